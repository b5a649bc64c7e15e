"""The bubble ledger: attributes every idle second of every stage to exactly one cause."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np

from ...core.micro_batch_columns import Floats, Ints, MicroBatchColumns
from ...core.run_record import RunRecord
from .attribution import attribute
from .causes import BUBBLES, CAUSES, Cause
from .contention import name_contention
from .idle import IdleColumns
from .lanes import lanes_of, leaving_lane
from .recovery import lost_since, name_recovery, with_waits_of_dropped


class Ledger:
    """Adds up the idle time of a run by cause, stage, micro-batch and request; `attribution.py` finds the causes.

    Attributes:
        lanes: what each stage computed.
        idle_columns: the idle intervals of each stage.
        micro_batches: the run's micro-batches by column.
        t0: start of the run in seconds: the first arrival or the first compute, whichever is earlier. A recorded window
            that opens without requests starts when it opens.
        t1: end of the last compute; a recorded window that closes without requests ends when it closes.
        faults: the pipeline's faults and their repairs.
        contended: seconds of each stage's compute in which its thread waited for a CPU.

    Args:
        record: the run; times of all stages in seconds on one clock, micro-batches unique on each stage.
    """

    def __init__(self, record: RunRecord) -> None:
        self.num_stages = record.num_stages
        self.faults = record.faults
        self.lanes = lanes_of(record.spans, record.num_stages)
        begun = [float(lane.begin[0]) for lane in self.lanes if len(lane.begin)]
        arrivals = [request.arrival for request in record.requests]
        opened, closed = record.window
        first = min([*begun, *arrivals], default=opened or 0.0)
        last = max((float(lane.end[-1]) for lane in self.lanes if len(lane.end)), default=first)
        self.t0: float = first if opened is None else min(opened, first)
        self.t1: float = last if closed is None else max(closed, last)
        self.micro_batches = MicroBatchColumns(record.micro_batches)
        waited = with_waits_of_dropped(record)
        leaving = leaving_lane(self.lanes, [lost_since(record.faults, stage) for stage in range(self.num_stages)])
        idle = attribute(waited, self.micro_batches, self.lanes, leaving, first, last, record.unknown)
        starts, ends = np.array([self.t0, last]), np.array([first, self.t1])
        no_request = IdleColumns.of(starts, ends, Cause.STARVED_NO_REQUEST, np.array([-1, -1]))
        idle = [IdleColumns.joined([columns, no_request]) for columns in idle]
        contended = [span for span in record.spans if span.contended_before or span.contended]
        self.contended: Floats = np.zeros(self.num_stages)
        np.add.at(self.contended, [s.stage for s in contended], [s.contended for s in contended])
        self.idle_columns = name_recovery(name_contention(idle, self.lanes, contended), record.faults)
        self._busy = [float(lane.seconds.sum()) for lane in self.lanes]
        by_cause = [np.bincount(idle.cause, idle.seconds, len(CAUSES)) for idle in self.idle_columns]
        self._by_cause = np.array(by_cause).reshape(self.num_stages, len(CAUSES))  # seconds, [stages, causes]

    @property
    def span_seconds(self) -> float:
        """Seconds from `t0` to `t1`."""
        return self.t1 - self.t0

    def busy_seconds(self, stage: int | None = None) -> float:
        """Return the compute seconds of a stage; None: of all stages."""
        return sum(self._busy) if stage is None else self._busy[stage]

    def seconds_by_cause(self, stage: int | None = None) -> dict[Cause, float]:
        """Return the idle seconds of a stage by cause; None: of all stages."""
        seconds = self._by_cause.sum(axis=0) if stage is None else self._by_cause[stage]
        return dict(zip(CAUSES, seconds.tolist(), strict=True))

    @property
    def stage_seconds(self) -> float:
        """The run's span times the stages."""
        return self.span_seconds * self.num_stages

    def gaps(self, stage: int) -> tuple[Floats, Ints]:
        """Return the idle seconds right before each micro-batch of `stage`, in order, and the code of their main cause.

        The main cause has the most seconds; its code is an index into `CAUSES`, or -1 if there was no gap. Fill counts
        as the gap before the first micro-batch.
        """
        idle = self.idle_columns[stage]
        awaited = idle.place >= 0
        table = np.zeros((len(self.lanes[stage].micro_batch), len(CAUSES)))
        np.add.at(table, (idle.place[awaited], idle.cause[awaited]), idle.seconds[awaited])
        total = table.sum(axis=1)
        return total, np.where(total > 0, table.argmax(axis=1), -1)

    @cached_property
    def _bubble_by_micro_batch(self) -> dict[int, float]:
        micro_batches, seconds = [], []
        for lane, idle in zip(self.lanes, self.idle_columns, strict=True):
            inner = (idle.cause != Cause.FILL_DRAIN.code) & (idle.place >= 0)
            micro_batches.append(lane.micro_batch[idle.place[inner]])
            seconds.append(idle.seconds[inner])
        known, place = np.unique(np.concatenate(micro_batches), return_inverse=True)
        summed = np.bincount(place, np.concatenate(seconds), len(known))
        return dict(zip(known.tolist(), summed.tolist(), strict=True))

    @cached_property
    def _bubble_by_request(self) -> dict[int, float]:
        return self.bubble_by_request()

    def bubble_by_request(self, first: int = 0) -> dict[int, float]:
        """Return the bubble time of each request in the micro-batches starting at index `first`."""
        seconds = [self.bubble_of_micro_batch(micro_batch) for micro_batch in self.micro_batches.micro_batch.tolist()]
        seconds[:first] = [0.0] * first
        return self.micro_batches.by_request(np.array(seconds, np.float64))

    def bubble_of_micro_batch(self, micro_batch: int) -> float:
        """Return the bubble time of a micro-batch: idle seconds right before it on all stages, without `fill_drain`."""
        return self._bubble_by_micro_batch.get(micro_batch, 0.0)

    def bubble_of_request(self, request: int) -> float:
        """Return the bubble time of a request: summed over all micro-batches that carried it (paper 5.3)."""
        return self._bubble_by_request.get(request, 0.0)

    def check(self) -> None:
        """Assert conservation: on each stage busy time plus the seconds of all causes is the run's span."""
        for stage in range(self.num_stages):
            idle = float(self._by_cause[stage].sum())
            error = abs(self._busy[stage] + idle - self.span_seconds)
            assert error <= 1e-6 * self.span_seconds + 1e-9, (
                f"stage {stage}: busy {self._busy[stage]} s + idle {idle} s is not the run's {self.span_seconds} s"
            )
            assert not len(self.idle_columns[stage].start) or self.idle_columns[stage].seconds.min() >= 0.0, stage


def inner_bubble_fraction(seconds: Mapping[Cause, float], stage_seconds: float) -> float:
    """Return the bubble fraction: idle time of the causes in `BUBBLES` over total stage-seconds; 0 for an empty run.

    Args:
        seconds: idle, by cause.
        stage_seconds: the run's span times the stages.
    """
    return sum(seconds[cause] for cause in BUBBLES) / stage_seconds if stage_seconds > 0 else 0.0
