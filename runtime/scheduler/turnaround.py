"""What as many micro-batches in flight as stages cost: how long stage 0 waits for the next, and why one more helps."""

from __future__ import annotations

from collections.abc import Sequence

from ..messages import Span
from ..spans import StepRecord

_SMOOTH = 1 / 8
_LONG = 0.05  # of a stage's time
_IDLE = 0.25  # of what one more micro-batch in flight adds to the time between tokens
_SLOW = 1 / 32  # smoothing of the idle share: one bubble is no rule


class Turnaround:
    """With as many micro-batches in flight as stages, each stage idles for the turnaround once in a round, however
    equal they are, and where they are not all equal each waits for the longest. One more in flight hides both, but a
    decode then comes round a stage's time later: over P stages, 1 / P of TBT.

    So it is worth it where the turnaround (activations under way between stages, and from the last back to stage 0)
    passes a small share of a stage's time, `_LONG`, or where stage 0 idles for more than `_IDLE` / P of its time.
    """

    def __init__(self, num_stages: int) -> None:
        self._num_stages = num_stages
        self._ends: dict[int, float] = {}  # by micro-batch under way: when the stage before ended it
        self._between = [0.0] * num_stages  # seconds on the way to each stage, averaged; [0]: back to the first
        self._busy = 0.0  # a stage's seconds for a micro-batch, averaged
        self._idle = 0.0  # share of stage 0's time between micro-batches, averaged
        self.is_long = False

    def observe(self, step: StepRecord, spans: Sequence[Span]) -> None:
        """Stages, one or several, have computed a micro-batch."""
        ends, last = self._ends, self._num_stages - 1
        for span in spans:
            busy, stage = span.end - span.begin, span.stage
            self._busy += _SMOOTH * (busy - self._busy)
            before = ends.pop(span.step, None)
            if stage > 0 and before is not None:
                self._add(stage, span.begin - max(before, span.ready))
            if stage == 0 and not self.is_long:
                self._look_at(step, span)
            if stage < last:
                ends[span.step] = span.end
            elif step.completed is not None:
                self._add(0, 2 * (step.completed - span.end))  # the result's way, and a step's that is as long
                # Long once, it stays so until it is clearly short: a change of the depth costs a bubble of its own.
                bound = _LONG * self._busy / (4 if self.is_long else 1)
                unequal = self._idle > _IDLE / self._num_stages
                self.is_long = self._num_stages > 1 and (unequal or sum(self._between) > bound)

    def _look_at(self, step: StepRecord, span: Span) -> None:
        """How long stage 0 waited for a micro-batch because of the depth."""
        waited = 0.0
        for wait in step.waits:
            if wait.reason == "depth_full":
                waited += max(0.0, min(wait.end, span.begin) - max(wait.start, span.ready))
        self._idle += _SLOW * (waited / max(span.end - span.ready, 1e-12) - self._idle)

    def _add(self, stage: int, seconds: float) -> None:
        self._between[stage] += _SMOOTH * (min(max(0.0, seconds), self._busy) - self._between[stage])
