"""Interference between requests: how much TTFT and TBT each request cost others.

A request is charged for the time that others lose to it, by its share of the compute time of micro-batches:

- A request in the same micro-batch loses the charged request's *marginal share*: the compute time of its tokens, by
  the stage's weights (`stage_weights.py`). The micro-batch's constant time and the time of its own tokens would have
  occurred anyway.
- A request that waits for a stage, or to be dispatched, loses that whole time to the requests in the micro-batch that
  it waits for, in proportion to their tokens' cost. It waits for the micro-batch that the stage computes; before
  dispatch, for the oldest micro-batch in flight, whose slot is freed next.

No request is charged for its own time. Nobody is charged for transport, control, recovery, and waits while the stage
was idle. The total charged equals the total lost.

Everything is a sum over micro-batches and stages, or over tokens. A request's share is linear in the features of its
tokens, so it is enough to know, per micro-batch, what a unit of each feature has cost others: the `price`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...core.features import FEATURES
from ...core.micro_batch_columns import Floats, Ints
from ...core.run_record import RunRecord
from .ledger import Ledger
from .micro_batch_paths import StageEvent, WaitClass
from .stage_weights import stage_weights
from .token_intervals import StagePart, TokenIntervals, stage_part

_CONSTANT = FEATURES.index("constant")
_NOTHING = 1e-30  # seconds of a micro-batch without tokens


@dataclass(frozen=True, slots=True)
class Charges:
    """Seconds that requests cost each other, in the record's order of requests.

    Attributes:
        cost: [requests] what others lost to each.
        lost: [requests] what each lost to others.
        unrecorded: what was lost to requests not in the record, for example if it starts in the middle of a run.
    """

    cost: Floats
    lost: Floats
    unrecorded: float


class Blame:
    """Charges of a run.

    Attributes:
        ttft: charges of all TTFTs.
        tbt: charges of all TBTs.
        intervals: the run's token intervals.

    Args:
        record: the run.
        intervals: the run's token intervals.
    """

    def __init__(self, record: RunRecord, intervals: TokenIntervals) -> None:
        self.intervals = intervals
        self._num_requests = len(record.requests)
        paths, lanes = intervals.paths, intervals.lanes
        self._rows = len(paths.completed)
        features = intervals.segments.features_by_row()
        self._weights = stage_weights(record, paths, lanes, features)
        self._of_tokens = self._weights.copy()
        self._of_tokens[:, _CONSTANT] = 0.0
        marginal = features @ self._of_tokens.T  # [R, stages] seconds that a micro-batch's tokens cost
        self._has_tokens = marginal.sum(axis=1) > 0
        self._marginal = np.maximum(marginal, _NOTHING)
        self._whole = np.maximum(features @ self._weights.T, _NOTHING)
        until = intervals.waits.until
        held = np.maximum(np.append(-np.inf, paths.completed)[:-1], paths.dispatched)
        # When each micro-batch with tokens was the oldest in flight, on the axis of accumulated dispatch waits.
        self._oldest = until(held, *_WAITS), until(np.where(self._has_tokens, paths.completed, held), *_WAITS)
        is_ttft = intervals.is_ttft[intervals.windows.interval]
        self.ttft = self._charges(np.flatnonzero(is_ttft))
        self.tbt = self._charges(np.flatnonzero(~is_ttft))

    @classmethod
    def of_run(cls, record: RunRecord, ledger: Ledger) -> Blame:
        """Return the blame of a run, reusing its ledger."""
        return cls(record, TokenIntervals(record, ledger.lanes))

    def of(self, chosen: Ints) -> Charges:
        """Return the charges of only some intervals, given by their indices."""
        is_chosen = np.zeros(len(self.intervals), np.bool_)
        is_chosen[chosen] = True
        return self._charges(np.flatnonzero(is_chosen[self.intervals.windows.interval]))

    def _charges(self, chosen: Ints) -> Charges:
        """Return the charges of some windows."""
        windows, segments, n = self.intervals.windows, self.intervals.segments, self._num_requests
        times = np.bincount(windows.kind[chosen], minlength=len(windows.row)).astype(np.float64)
        kinds = np.flatnonzero(times)
        times = times[kinds]
        row, entry = windows.row[kinds], windows.entry[chosen]
        computed = windows.parts[kinds][:, [stage_part(StagePart.COMPUTE, s) for s in range(len(self._weights))]]
        in_it, behind = np.zeros((self._rows, len(self._weights))), np.zeros((self._rows, len(self._weights)))
        for stage in range(len(self._weights)):
            in_it[:, stage] = np.bincount(row, times * computed[:, stage], self._rows)
        lost = (computed * (self._marginal[row] / self._whole[row])).sum(axis=1)
        price = (in_it / self._whole) @ self._of_tokens
        own_price = (computed / self._whole[row]) @ self._of_tokens
        for stage in range(len(self._weights)):
            behind[:, stage], seconds = self._behind_on(stage, kinds, times)
            lost += seconds
        price += (behind / self._marginal) @ self._of_tokens
        waits, seconds = self._behind_dispatch(kinds, times)
        lost += seconds
        price += (waits / self._marginal.sum(axis=1))[:, None] * self._of_tokens.sum(axis=0)
        kind_place = np.zeros(len(windows.row), np.int64)
        kind_place[kinds] = np.arange(len(kinds))
        used = kind_place[windows.kind[chosen]]
        own = segments.cost(own_price, used, entry)
        place = segments.place[entry]
        costs = segments.cost(price, segments.row)
        cost = np.bincount(segments.place + 1, costs, n + 1)  # the first is of requests not in the record
        own_cost = np.bincount(place, own, n)
        return Charges(
            np.maximum(cost[1:] - own_cost, 0.0),
            np.maximum(np.bincount(place, lost[used], n) - own_cost, 0.0),
            float(cost[0]),
        )

    def _behind_on(self, stage: int, kinds: Ints, times: Floats) -> tuple[Floats, Floats]:
        """Return the cost of waits for a stage: by the micro-batch that it computed, and by kind."""
        paths, lane, windows = self.intervals.paths, self.intervals.lanes[stage], self.intervals.windows
        here = np.flatnonzero((paths.lane_place[:, stage] >= 0) & self._has_tokens)
        here = here[np.argsort(paths.lane_place[here, stage], kind="stable")]
        place = paths.lane_place[here, stage]
        points = paths.points[windows.row[kinds], stage]
        low, high = windows.dispatched[kinds], windows.end[kinds]
        start = np.clip(points[:, StageEvent.INPUT], low, high)
        end = np.clip(points[:, StageEvent.FREE], low, high)
        suffered, seconds = _overlaps(lane.begin[place], lane.end[place], start, end, times)
        by_row = np.zeros(self._rows)
        by_row[here] = suffered
        return by_row, seconds

    def _behind_dispatch(self, kinds: Ints, times: Floats) -> tuple[Floats, Floats]:
        """Return the cost of waits to be dispatched: by the oldest micro-batch in flight, and by kind."""
        windows, until = self.intervals.windows, self.intervals.waits.until
        start, gone = until(windows.start[kinds], *_WAITS), until(windows.gone[kinds], *_WAITS)
        suffered, seconds = _overlaps(*self._oldest, start, gone, times)
        away = np.flatnonzero(windows.back[kinds] > windows.gone[kinds])
        if len(away):
            back = until(windows.back[kinds[away]], *_WAITS)
            dispatched = until(windows.dispatched[kinds[away]], *_WAITS)
            more, later = _overlaps(*self._oldest, back, dispatched, times[away])
            suffered += more
            seconds[away] += later
        return suffered, seconds


_WAITS = (WaitClass.BUSY, WaitClass.NO_ROOM)


def _overlaps(begin: Floats, end: Floats, start: Floats, stop: Floats, times: Floats) -> tuple[Floats, Floats]:
    """Return how long intervals [start, stop) overlap pieces [begin, end), which are ascending and disjoint.

    Returns:
        The overlap of each piece, with each interval weighted by `times`, and the overlap of each interval.
    """
    pieces = len(begin)
    if not pieces:
        return np.zeros(0), np.zeros(len(start))
    first = np.searchsorted(end, start, side="right")
    last = np.searchsorted(begin, stop, side="left") - 1
    seconds = np.zeros(len(start))
    met = np.flatnonzero((last >= first) & (stop > start))
    first, last, start, stop, times = first[met], last[met], start[met], stop[met], times[met]
    length = end - begin
    until = np.append(0.0, np.cumsum(length))
    early, late = np.maximum(start - begin[first], 0.0), np.maximum(end[last] - stop, 0.0)
    seconds[met] = until[last + 1] - until[first] - early - late
    count = np.cumsum(np.bincount(first, times, pieces + 1) - np.bincount(last + 1, times, pieces + 1))[:pieces]
    suffered = count * length - np.bincount(first, times * early, pieces) - np.bincount(last, times * late, pieces)
    return np.maximum(suffered, 0.0), seconds
