"""What lies between the stages' times of a run, learned from its spans: the host's share, and the links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter

import numpy as np

from ..core.messages import Span
from ..core.micro_batch_columns import Floats
from ..core.run_record import MicroBatchRecord, RunRecord
from ..cost.operators import HostTimes
from .learned_costs import LinkSeconds
from .non_negative import non_negative_least_squares

_PASSES = 3  # of telling waits for an input from waits for a stage's host
_LONGEST_TURN = 0.02  # seconds that the coordinator may take from a result to the next dispatch


@dataclass(frozen=True, slots=True)
class LearnedHost:
    """Seconds that a run took between stages, as samples.

    Attributes:
        dispatch: from a result until the first stage, which was free, begins the next micro-batch.
        result: from the end of the last stage until the coordinator has the result.
        turnaround: from the end of a stage's micro-batch to the begin of the next, whose input was there.
        links: to each stage but the first, which waited.
        link_ratios: of all links, samples over what `links` say.
    """

    dispatch: Floats
    result: Floats
    turnaround: Floats
    links: tuple[LinkSeconds, ...]
    link_ratios: Floats

    @property
    def times(self) -> HostTimes:
        """The means."""
        return HostTimes(dispatch=_mean(self.dispatch), result=_mean(self.result), turnaround=_mean(self.turnaround))

    @classmethod
    def of(cls, record: RunRecord) -> LearnedHost:
        """Learn from a run's spans and dispatches."""
        order = sorted(record.micro_batches, key=attrgetter("micro_batch"))
        lanes: list[dict[int, Span]] = [{} for _ in range(record.num_stages)]
        for span in record.spans:
            lanes[span.stage][span.micro_batch] = span
        turns = _turns(order)
        dispatch, turnaround = _entries(order, lanes[0])
        links, ratios = [], []
        for before, after in pairwise(lanes):
            link, ratio, own = _link(order, before, after)
            links.append(link)
            ratios.append(ratio)
            turnaround.append(own)
        last = lanes[-1]
        result = [
            m.completed - last[m.micro_batch].end
            for m in order
            if m.completed is not None and m.micro_batch in last
        ]  # fmt: skip
        waits = np.concatenate(turnaround) if turnaround else np.empty(0)
        if not len(waits):  # no stage ever had its next input ready: what it takes until it waits for one
            lanes_in_order = [[lane[number] for number in sorted(lane)] for lane in lanes]
            waits = np.array([
                max(0.0, after.ready - before.end) for spans in lanes_in_order for before, after in pairwise(spans)
            ])  # fmt: skip
            waits = np.minimum(waits, np.median(waits)) if len(waits) else waits
        return cls(
            dispatch + (float(np.median(turns)) if len(turns) else 0.0), np.maximum(result, 0.0), waits, tuple(links),
            np.concatenate(ratios) if ratios else np.empty(0),
        )  # fmt: skip


def _turns(order: Sequence[MicroBatchRecord]) -> Floats:
    """Return the coordinator's own seconds from a result to the dispatch that it made room for."""
    done = np.sort([m.completed for m in order if m.completed is not None])
    at = np.array([m.dispatched for m in order])
    place = np.searchsorted(done, at, side="right") - 1
    turns = (at - done[np.maximum(place, 0)])[place >= 0] if len(done) else np.empty(0)
    return turns[turns < _LONGEST_TURN]


def _entries(order: Sequence[MicroBatchRecord], lane: dict[int, Span]) -> tuple[Floats, list[Floats]]:
    """Return the samples of dispatches, and those of turnarounds of the first stage."""
    pairs = [(m.dispatched, lane[m.micro_batch]) for m in order if m.micro_batch in lane]
    if len(pairs) < 2:
        return np.array([span.begin - at for at, span in pairs]), []
    given = np.array([at for at, _ in pairs])
    begin = np.array([span.begin for _, span in pairs])
    free = np.array([-np.inf, *(span.end for _, span in pairs[:-1])])
    waits, own = _split(given, free, begin, np.zeros(len(given)))
    return waits, [own]


def _link(
    order: Sequence[MicroBatchRecord], before: dict[int, Span], after: dict[int, Span]
) -> tuple[LinkSeconds, Floats, Floats]:
    """Return a link, the ratios of its samples to it, and the samples of turnarounds of the stage behind it."""
    both = [m for m in order if m.micro_batch in before and m.micro_batch in after]
    rows = np.array([m.num_tokens for m in both], np.float64)
    given = np.array([before[m.micro_batch].end for m in both])
    begin = np.array([after[m.micro_batch].begin for m in both])
    free = np.array([-np.inf, *(after[m.micro_batch].end for m in both[:-1])])
    link = LinkSeconds(0.0, 0.0)
    for _ in range(_PASSES):
        expected = link.message + link.row * rows
        is_waiting = given + expected >= free
        if not is_waiting.any():
            break
        link = _fit_link(rows[is_waiting], (begin - given)[is_waiting])
    expected = link.message + link.row * rows
    is_waiting = given + expected >= free
    ratios = (begin - given)[is_waiting] / np.maximum(expected[is_waiting], 1e-9)
    return link, ratios, (begin - free)[~is_waiting]


def _split(given: Floats, free: Floats, begin: Floats, extra: Floats) -> tuple[Floats, Floats]:
    """Return the seconds from `given` to `begin` where the stage waited for its input, and from `free` where not."""
    level = 0.0
    is_waiting = given >= free
    for _ in range(_PASSES):
        if is_waiting.any():
            level = float(np.median((begin - given)[is_waiting]))
        is_waiting = given + level >= free
    return (begin - given)[is_waiting], (begin - free)[~is_waiting]


def _fit_link(rows: Floats, seconds: Floats) -> LinkSeconds:
    """Fit a message's and a row's seconds, by typical samples, so that their sum is that of the samples."""
    design = np.stack([np.ones(len(rows)), rows], axis=1)
    predicted = np.full(len(rows), max(1e-9, float(np.median(seconds))))
    found = np.array([predicted[0], 0.0])
    for _ in range(8):
        weight = np.minimum(1.0, 1.0 / np.maximum(np.abs(seconds / predicted - 1), 1e-9)) / predicted**2
        weighted = design * weight[:, None]
        found = non_negative_least_squares(weighted.T @ design, weighted.T @ seconds)
        predicted = np.maximum(design @ found, 1e-9)
    found = found * max(0.0, float(seconds.sum())) / float(predicted.sum())
    return LinkSeconds(float(found[0]), float(found[1]))


def _mean(samples: Floats) -> float:
    return max(0.0, float(samples.mean())) if len(samples) else 0.0
