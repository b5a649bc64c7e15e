"""The change of a run's P99 TBT or P99 TTFT, by part of the intervals and by stage, exactly.

A percentile is the length of one interval, or of two by interpolation. What it is made of is read off the intervals
around it: their parts, scaled to the percentile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ..core.micro_batch_columns import Floats, values_at
from ..ledger.fleet import Fleet
from ..ledger.latencies import NOT_COMPLETED
from ..ledger.token_intervals import Part, StagePart, TokenIntervals, stage_part

Latency = Literal["itl", "ttft"]
# All parts of an interval, each summed over the stages where it is a stage's.
TAIL_PARTS = (*(part.name.lower() for part in Part), *(part.name.lower() for part in StagePart))

_SHARE = 0.99  # the percentile
_BAND = 0.01  # share of the intervals that are read around it
_LEAST = 20  # intervals
_TOLERANCE = 1e-9  # of the two percentiles


@dataclass(frozen=True, slots=True)
class Tail:
    """A run's P99 in seconds, and what it is made of.

    Attributes:
        seconds: the P99.
        parts: seconds by `TAIL_PARTS`, which sum to the P99.
        by_stage: the seconds of each stage's `StagePart`s.
        intervals: how many were read.
        requests: which requests they are of, with their number, the most first.
        prompts: which requests had chunks in the micro-batches that ended them, with the number of intervals.
        prefill, decodes: mean prompt tokens and decodes of these micro-batches.
    """

    seconds: float
    parts: Mapping[str, float]
    by_stage: Sequence[Mapping[str, float]]
    intervals: int
    requests: Sequence[tuple[int, int]]
    prompts: Sequence[tuple[int, int]]
    prefill: float
    decodes: float


@dataclass(frozen=True, slots=True)
class TailDifference:
    """The change of a P99 from one run to another."""

    base: Tail
    run: Tail

    @property
    def change(self) -> float:
        """Seconds by which the P99 of the run is longer than that of the base."""
        return self.run.seconds - self.base.seconds

    @property
    def parts(self) -> dict[str, float]:
        """Its change by part; sums to `change`."""
        return {part: self.run.parts[part] - self.base.parts[part] for part in TAIL_PARTS}

    @property
    def by_stage(self) -> list[dict[str, float]]:
        """The change of each stage's parts; empty where the runs' stages differ in number."""
        if len(self.base.by_stage) != len(self.run.by_stage):
            return []
        pairs = zip(self.base.by_stage, self.run.by_stage, strict=True)
        return [{part: after[part] - seconds for part, seconds in before.items()} for before, after in pairs]

    def check(self) -> None:
        """Assert that the parts sum to the change."""
        error = abs(sum(self.parts.values()) - self.change)
        assert error <= _TOLERANCE * (self.base.seconds + self.run.seconds), (self.parts, self.change)


def compare_tails(base: Fleet, run: Fleet) -> dict[Latency, TailDifference]:
    """Compare the P99 of TBT and of TTFT; one that either run has no interval of is left out."""
    before, after = _Intervals(base), _Intervals(run)
    names: tuple[Latency, ...] = ("itl", "ttft")
    found = {name: (before.tail(name), after.tail(name)) for name in names}
    differences = {name: TailDifference(a, b) for name, (a, b) in found.items() if a is not None and b is not None}
    for difference in differences.values():
        difference.check()
    return differences


class _Intervals:
    """The intervals of all completed requests of a run, or of all replicas of a fleet, by column."""

    def __init__(self, fleet: Fleet) -> None:
        columns: list[tuple[npt.NDArray[Any], ...]] = []  # of each replica
        tables: list[Floats] = []
        self._chunks: list[list[int]] = []  # requests that have some, by micro-batch
        self._num_stages = fleet.num_stages
        num_columns, rows, stage = len(Part) + len(StagePart) * fleet.num_stages, 0, 0
        for record, ledger in zip(fleet.records, fleet.ledgers, strict=True):
            intervals = TokenIntervals(record, ledger.lanes)
            done = np.array([r.finish_reason not in NOT_COMPLETED for r in record.requests], np.bool_)
            kept = np.flatnonzero(done[intervals.place]) if len(done) else np.zeros(0, np.int64)
            place = ledger.micro_batches.places(intervals.micro_batch[kept])
            held = [values_at(each, place) for each in (ledger.micro_batches.prefill, ledger.micro_batches.decodes)]
            in_all = np.where(place < 0, -1, place + len(self._chunks))
            is_ttft, row = intervals.is_ttft[kept], intervals.row[kept] + rows
            columns.append((intervals.seconds[kept], intervals.request[kept], in_all, is_ttft, row, *held))
            self._chunks += [[chunk.request for chunk in m.chunks] for m in record.micro_batches]
            table = np.zeros((len(intervals.table), num_columns))
            table[:, : len(Part)] = intervals.table[:, : len(Part)]
            first = stage_part(StagePart.WAIT, stage)
            table[:, first : first + len(StagePart) * record.num_stages] = intervals.table[:, len(Part) :]
            tables.append(table)
            rows += len(table)
            stage += record.num_stages
        self._table = np.concatenate(tables)
        joined = [np.concatenate(column) for column in zip(*columns, strict=True)]
        self._seconds, self._requests, self._micro_batches, self._is_ttft, self._row, *of_batch = joined
        self._held = np.stack(of_batch, axis=1)

    def tail(self, latency: Latency) -> Tail | None:
        """Return the P99, as `summary.json` has it, and its parts; None where there is no interval."""
        chosen = np.flatnonzero(self._is_ttft == (latency == "ttft"))
        if not len(chosen):
            return None
        chosen = chosen[np.argsort(self._seconds[chosen], kind="stable")]
        lengths = self._seconds[chosen]
        exact = float(np.percentile(lengths, 100 * _SHARE))
        size = min(len(chosen), max(_LEAST, round(_BAND * len(chosen))))
        first = round(_SHARE * (len(chosen) - 1)) - size // 2
        first = min(max(0, first), len(chosen) - size)
        band = chosen[first : first + size]
        times = np.bincount(self._row[band], minlength=len(self._table))
        parts = times @ self._table
        whole = float(parts.sum())
        if whole > 0:
            parts = parts * (exact / whole)
        else:
            parts[Part.UNKNOWN] = exact
        of_stages = parts[len(Part) :].reshape(self._num_stages, len(StagePart))
        summed = [*parts[: len(Part)].tolist(), *of_stages.sum(axis=0).tolist()]
        counts = Counter(self._requests[band].tolist()).most_common()
        places = [place for place in self._micro_batches[band].tolist() if place >= 0]
        beside = Counter(request for place in places for request in set(self._chunks[place]))
        prefill, decodes = self._held[band].mean(axis=0).tolist()
        names = [part.name.lower() for part in StagePart]
        return Tail(
            exact,
            dict(zip(TAIL_PARTS, summed, strict=True)),
            [dict(zip(names, row, strict=True)) for row in of_stages.tolist()],
            size,
            counts,
            beside.most_common(),
            prefill,
            decodes,
        )
