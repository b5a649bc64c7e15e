"""The micro-batches of one rank: a span of compute for each step, with the transfers that belong to it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress

import numpy as np

from .rank_trace import RankTrace, Step, Transfer, seconds_within

_SMALL = 0.02  # of the compute between two handovers: less lies between the transfers of one handover


@dataclass(slots=True)
class StageSpan:
    """What a rank did for one micro-batch; seconds on the trace's clock.

    `begin` and `end` are of its compute, the first kernel or operator and the last; `computed` of these seconds are
    within kernels or operators.
    """

    step: Step
    begin: float
    end: float
    computed: float
    receives: list[Transfer] = field(default_factory=list)
    sends: list[Transfer] = field(default_factory=list)


def stage_spans(trace: RankTrace) -> list[StageSpan]:
    """Return the micro-batches of a rank in order of time. Steps without tokens are none.

    A receive belongs to the step that it ends before or in; a send to the step that began last. A step computes from
    its last receive on, until the rank turns to something else: a send, the next receive, the next step.
    """
    steps = trace.steps or _steps_by_transfers(trace)
    ends, starts = [step.end for step in steps], [step.start for step in steps]
    receives: list[list[Transfer]] = [[] for _ in steps]
    sends: list[list[Transfer]] = [[] for _ in steps]
    for receive in trace.receives:
        if (place := bisect_right(ends, receive.end)) < len(steps):
            receives[place].append(receive)
    for send in trace.sends:
        if (place := bisect_left(starts, send.start) - 1) >= 0:
            sends[place].append(send)
    spans = []
    for place, step in enumerate(steps):
        if step.is_empty:
            continue
        start = max([step.start, *(receive.end for receive in receives[place])])
        turned = [send.start for send in sends[place] if send.start >= step.end]
        if place + 1 < len(steps):
            turned += [steps[place + 1].start]
            turned += [receive.start for receive in receives[place + 1] if receive.start >= step.end]
        begin, end = _hull(trace, start, max(start, min(turned, default=np.inf)))
        spans.append(StageSpan(step, begin, end, 0.0, receives[place], sends[place]))
    edges = np.array([(span.begin, span.end) for span in spans]).reshape(-1, 2)
    for span, computed in zip(spans, seconds_within(trace.computes, edges[:, 0], edges[:, 1]).tolist(), strict=True):
        span.computed = computed
    return spans


def _hull(trace: RankTrace, start: float, end: float) -> tuple[float, float]:
    """Return the first begin and last end of compute within [start, end); `start` twice where there is none."""
    begins, ends = trace.computes[:, 0], trace.computes[:, 1]
    first = int(np.searchsorted(ends, start, side="right"))
    last = int(np.searchsorted(begins, end, side="left")) - 1
    if first > last:
        return start, start
    return max(start, float(begins[first])), min(end, float(ends[last]))


def _steps_by_transfers(trace: RankTrace) -> list[Step]:
    """Return the steps of a trace that names none.

    A step computes from one input to the next, or, on the first stage, up to each send. Where there are neither, one
    step holds all compute.
    """
    if not len(trace.computes):
        return []
    first, last = float(trace.computes[0, 0]), float(trace.computes[-1, 1])
    if trace.receives:
        edges = _handovers(trace, [receive.end for receive in trace.receives])
        return [Step(start, end) for start, end in zip(edges, [*edges[1:], last], strict=True) if end > start]
    edges = _handovers(trace, [send.start for send in trace.sends], at_end=True) or [last]
    return [Step(start, end) for start, end in zip([first, *edges[:-1]], edges, strict=True) if end > start]


def _handovers(trace: RankTrace, times: Sequence[float], *, at_end: bool = False) -> list[float]:
    """Return the transfers' times.

    Of those that nearly no compute parts, it is only the last, or the first `at_end` of compute.
    """
    if len(times) < 2:
        return list(times)
    between = seconds_within(trace.computes, np.array(times[:-1]), np.array(times[1:]))
    parted = between > _SMALL * float(np.quantile(between, 0.9))
    kept = np.concatenate([[True], parted]) if at_end else np.concatenate([parted, [True]])
    return list(compress(times, kept))
