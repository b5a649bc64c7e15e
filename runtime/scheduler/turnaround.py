"""How long a micro-batch spends between stages: activations under way, and from the last stage back to stage 0."""

from __future__ import annotations

from ..messages import Span
from ..spans import StepRecord

_LONG = 0.05  # of a stage's time
_SMOOTH = 1 / 16


class Turnaround:
    """With as many micro-batches in flight as stages, each stage idles for the turnaround once in a round, however
    equal they are. One more in flight hides it, but a decode then comes round a stage's time later.

    So it is long where it passes a small share of a stage's time: over P stages, `_LONG` / P of the throughput for
    1 / P of TBT.
    """

    def __init__(self, num_stages: int) -> None:
        self._num_stages = num_stages
        self._ends: dict[int, float] = {}  # by micro-batch under way: when the stage before ended it
        self._between = [0.0] * num_stages  # seconds on the way to each stage, averaged; [0]: back to the first
        self._busy = 0.0  # a stage's seconds for a micro-batch, averaged
        self.is_long = False

    def observe(self, step: StepRecord, span: Span) -> None:
        busy = span.end - span.begin
        self._busy += _SMOOTH * (busy - self._busy)
        before = self._ends.pop(span.step, None)
        if span.stage > 0 and before is not None:
            self._add(span.stage, span.begin - max(before, span.ready))
        if span.stage < self._num_stages - 1:
            self._ends[span.step] = span.end
        elif step.completed is not None:
            self._add(0, 2 * (step.completed - span.end))  # the result's way, and a step's that is as long
            # Long once, it stays so until it is clearly short: a change of the depth costs a bubble of its own.
            bound = _LONG * self._busy / (2 if self.is_long else 1)
            self.is_long = self._num_stages > 1 and sum(self._between) > bound

    def _add(self, stage: int, seconds: float) -> None:
        self._between[stage] += _SMOOTH * (min(max(0.0, seconds), self._busy) - self._between[stage])
