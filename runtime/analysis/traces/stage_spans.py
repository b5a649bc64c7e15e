"""The micro-batches of one rank: one compute span per step, with the step's transfers."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress

import numpy as np

from .rank_trace import RankTrace, Step, Transfer, seconds_within

_SMALL = 0.02  # transfers with at most this share of a step's compute between them belong to one handover


@dataclass(slots=True)
class StageSpan:
    """What a rank did for one micro-batch; seconds on the trace's clock.

    `begin` and `end` delimit its compute, from the first kernel or operator to the last; `computed` is the part of this
    time inside kernels or operators.
    """

    step: Step
    begin: float
    end: float
    computed: float
    receives: list[Transfer] = field(default_factory=list)
    sends: list[Transfer] = field(default_factory=list)


def stage_spans(trace: RankTrace) -> list[StageSpan]:
    """Return the micro-batches of a rank in time order. Steps without tokens are skipped.

    A receive belongs to the first step that ends after it; a send to the last step that began before it. A step
    computes from the end of its last receive until the rank's next activity: a send, the next receive or the next step.
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
    """Return the first begin and last end of compute within [start, end); `start` twice if there is none."""
    begins, ends = trace.computes[:, 0], trace.computes[:, 1]
    first = int(np.searchsorted(ends, start, side="right"))
    last = int(np.searchsorted(begins, end, side="left")) - 1
    if first > last:
        return start, start
    return max(start, float(begins[first])), min(end, float(ends[last]))


def _steps_by_transfers(trace: RankTrace) -> list[Step]:
    """Infer the steps of a trace without step annotations.

    A step lasts from one input to the next or, on the first stage, until each send. Without sends and receives, all
    compute is one step.
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
    """Return one time per handover.

    Transfers with almost no compute between them are one handover. Its time is the last transfer's, or with `at_end`
    (transfers follow the compute) the first one's.
    """
    if len(times) < 2:
        return list(times)
    between = seconds_within(trace.computes, np.array(times[:-1]), np.array(times[1:]))
    parted = between > _SMALL * float(np.quantile(between, 0.9))
    kept = np.concatenate([[True], parted]) if at_end else np.concatenate([parted, [True]])
    return list(compress(times, kept))
