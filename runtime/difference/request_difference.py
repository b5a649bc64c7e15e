"""The change of the makespan from one run to another by request, exactly.

On each stage a micro-batch's compute seconds, and the idle seconds right before it, are divided among its requests by
what their tokens cost. Fill, drain and what no micro-batch's record names are no request's. So the seconds of all
requests and of none are the makespan, in the mean of the stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..core.micro_batch_columns import Floats
from ..ledger.causes import Cause
from ..ledger.fleet import Fleet
from .difference import LEDGER_PARTS
from .segments import Segments

NO_REQUEST = "no request"

_TOLERANCE = 1e-9  # of the makespans
_ALIKE = 0.9  # share of the requests that are in both runs, from which on requests are compared one by one
_GROUPS = 4  # by length, where they are not

Lengths = dict[int, tuple[int, int]]  # prompt and output tokens by request


@dataclass(frozen=True, slots=True)
class RequestChange:
    """A request's, or a group's, seconds in both runs: by `LEDGER_PARTS`, in the mean of the stages.

    Attributes:
        name: "request 12", a group in words, or `NO_REQUEST`.
        requests: number of each run's, in the base run and in the other; 0 in a run that has none.
        tokens: prompt and output tokens of all of them, in the run that has them.
    """

    name: str
    requests: tuple[int, int]
    tokens: tuple[int, int]
    base: Floats
    run: Floats

    @property
    def change(self) -> float:
        """Seconds by which it took longer in the run than in the base."""
        return float(self.run.sum() - self.base.sum())

    @property
    def parts(self) -> dict[str, float]:
        """Its change by part."""
        return dict(zip(LEDGER_PARTS, (self.run - self.base).tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class RequestDifference:
    """The change of the makespan by request, or by group of requests where the runs' requests are not the same.

    Attributes:
        by_id: whether they are single requests.
        changes: the largest first; they sum to the change of the makespan.
    """

    by_id: bool
    changes: Sequence[RequestChange]

    @property
    def only_base(self) -> list[RequestChange]:
        """The requests that only the base run has."""
        return [each for each in self.changes if each.requests == (1, 0)]

    @property
    def only_run(self) -> list[RequestChange]:
        """The requests that only the other run has."""
        return [each for each in self.changes if each.requests == (0, 1)]


def compare_requests(base: Fleet, run: Fleet, weights: Floats) -> RequestDifference:
    """Divide the change of the makespan by request.

    Args:
        base: the base run, one pipeline or several replicas.
        run: the other one.
        weights: seconds of each feature over all stages, by which a micro-batch's tokens are weighed.
    """
    before, after = _seconds(base, weights), _seconds(run, weights)
    lengths, lengths_after = _lengths(base), _lengths(run)
    pairs = _pairs(lengths, lengths_after)
    alike = sum(a is not None and b is not None for a, b in pairs)
    by_id = alike > 0 and alike >= _ALIKE * min(len(lengths), len(lengths_after))
    named = (_one_by_one if by_id else _by_length)(pairs, lengths, lengths_after)
    changes = []
    for name, mine, others in named:
        tokens = np.array([*(lengths[r] for r in mine), *(lengths_after[r] for r in others)], np.int64).reshape(-1, 2)
        prompt, output = (tokens.sum(axis=0) // (2 if by_id and mine and others else 1)).tolist()
        counts, seconds = (len(mine), len(others)), (_summed(before, mine), _summed(after, others))
        changes.append(RequestChange(name, counts, (prompt, output), *seconds))
    rest = (_summed(before, before.keys() - lengths.keys()), _summed(after, after.keys() - lengths_after.keys()))
    changes.append(RequestChange(NO_REQUEST, (0, 0), (0, 0), *rest))
    changes.sort(key=lambda each: -abs(each.change))
    change, found = run.span_seconds - base.span_seconds, sum(each.change for each in changes)
    assert abs(found - change) <= _TOLERANCE * (base.span_seconds + run.span_seconds), (found, change)
    return RequestDifference(by_id, changes)


_NOBODY = -1  # stands for no request; requests are numbered from 0


def _seconds(fleet: Fleet, weights: Floats) -> dict[int, Floats]:
    """Return the seconds of each request by part, in the mean of the stages; `_NOBODY` has the rest of the makespan."""
    summed: dict[int, Floats] = {_NOBODY: np.zeros(len(LEDGER_PARTS))}
    for record, ledger in zip(fleet.records, fleet.ledgers, strict=True):
        segments = Segments(record.micro_batches)
        table = np.zeros((len(record.micro_batches) + 1, len(LEDGER_PARTS)))  # the last row is nobody's
        for lane, idle in zip(ledger.lanes, ledger.idle_columns, strict=True):
            at = ledger.micro_batches.places(lane.micro_batch)
            np.add.at(table, (at, np.zeros_like(at)), lane.seconds)
            before = np.append(at, -1)[idle.place]
            np.add.at(table, (np.where(idle.cause == Cause.FILL_DRAIN.code, -1, before), 1 + idle.cause), idle.seconds)
        held = np.bincount(segments.at, minlength=len(table)) > 0
        summed[_NOBODY] += table[~held].sum(axis=0)
        extra = (fleet.span_seconds - ledger.span_seconds) * ledger.num_stages  # before its first, after its last
        summed[_NOBODY][1 + Cause.FILL_DRAIN.code] += extra
        shares = segments.shares(weights)
        numbers, place = np.unique(segments.request, return_inverse=True)
        for part in np.flatnonzero(table[held].any(axis=0)).tolist():
            each = np.bincount(place, shares * table[segments.at, part], len(numbers))
            for number, seconds in zip(numbers.tolist(), each.tolist(), strict=True):
                if number not in summed:
                    summed[number] = np.zeros(len(LEDGER_PARTS))
                summed[number][part] += seconds
    return {number: seconds / max(1, fleet.num_stages) for number, seconds in summed.items()}


def _lengths(fleet: Fleet) -> Lengths:
    return {r.request: (r.prompt_tokens, r.output_tokens) for r, _ in fleet.served}


Pair = tuple[int | None, int | None]  # a request of each run, None where only the other one has it
Named = tuple[str, list[int], list[int]]  # a name, and the requests of each run


def _pairs(base: Lengths, run: Lengths) -> list[Pair]:
    """Pair the requests: by number where lengths are equal, or else from both ends on, as where one was put in."""
    by_number: list[Pair] = [(r, r) for r in base if run.get(r) == base[r]]
    mine, others = sorted(base), sorted(run)
    shorter = min(len(mine), len(others))
    first = next((n for n in range(shorter) if base[mine[n]] != run[others[n]]), shorter)
    rest = shorter - first
    last = next((n for n in range(rest) if base[mine[-1 - n]] != run[others[-1 - n]]), rest)
    from_ends: list[Pair] = list(zip(mine[:first], others[:first], strict=True))
    from_ends += zip(mine[len(mine) - last :], others[len(others) - last :], strict=True)
    found = by_number if len(by_number) >= len(from_ends) else from_ends
    paired, paired_after = {a for a, _ in found}, {b for _, b in found}
    found += [(r, None) for r in mine if r not in paired]
    return [*found, *((None, r) for r in others if r not in paired_after)]


def _one_by_one(pairs: Sequence[Pair], base: Lengths, run: Lengths) -> Iterator[Named]:
    for a, b in pairs:
        moved = f" ({b} in the other run)" if None not in (a, b) and a != b else ""
        yield f"request {b if a is None else a}{moved}", [] if a is None else [a], [] if b is None else [b]


def _by_length(pairs: Sequence[Pair], base: Lengths, run: Lengths) -> Iterator[Named]:
    """Group the requests of both runs by quantiles of their prompt and output tokens."""
    totals = np.array([sum(lengths) for lengths in (*base.values(), *run.values())], np.int64)
    if not len(totals):
        return
    bounds = np.unique(np.quantile(totals, np.linspace(0, 1, _GROUPS + 1)[1:], method="higher"))
    low = int(totals.min())
    for high in bounds.tolist():
        mine, others = ([r for r, own in lengths.items() if low <= sum(own) <= high] for lengths in (base, run))
        yield f"requests of {low:,} to {high:,} tokens", mine, others
        low = high + 1


def _summed(seconds: Mapping[int, Floats], requests: Iterable[int]) -> Floats:
    found = [seconds[request] for request in requests if request in seconds]
    return np.sum(found, axis=0) if found else np.zeros(len(LEDGER_PARTS))
