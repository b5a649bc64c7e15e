"""What as many micro-batches in flight as stages cost: how long even the busiest waits, and why one more helps."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

from collections.abc import Sequence

from ...core.messages import Span
from ...core.run_record import MicroBatchRecord

_SLOW = 1 / 64  # weight of the newest micro-batch: one bubble is no rule
_IDLE = 1 / 8  # of what one more micro-batch in flight adds to the time between tokens


class Turnaround:
    """With as many micro-batches in flight as stages, each stage idles for the turnaround (activations under way
    between stages, and from the last back to stage 0) once in a round, however equal they are, and where they are not
    all equal each waits for the longest. One more in flight hides both, but a decode then comes round a stage's time
    later: over P stages, 1 / P of TBT.

    So it is worth it where even the busiest stage idles for more than `_IDLE` / P of its time. What the others idle
    beyond that is theirs for being faster, and no depth helps.
    """

    def __init__(self, num_stages: int) -> None:
        self._busy = [0.0] * num_stages  # a stage's seconds for a micro-batch, averaged
        self._idle = [0.0] * num_stages  # and before one, while there was work
        self._bound = _IDLE / num_stages if num_stages > 1 else 1.0
        self.is_long = False

    def observe(self, micro_batch: MicroBatchRecord, spans: Sequence[Span]) -> None:
        """Stages, one or several, have computed a micro-batch, with as many in flight as stages. To be told of each:
        all idle time of a round may lie before one of its micro-batches."""
        for wait in micro_batch.waits:
            if wait.reason != "depth_full":
                return
        for span in spans:
            stage, seconds = span.stage, span.end - span.begin
            busy = self._busy[stage] or seconds
            self._busy[stage] = busy = busy + _SLOW * (seconds - busy)
            idle = min(max(0.0, span.input - span.ready), busy)
            self._idle[stage] += _SLOW * (idle - self._idle[stage])
        if spans[-1].stage == len(self._busy) - 1:
            least = min([i / (i + b) if b else 0.0 for i, b in zip(self._idle, self._busy, strict=True)])
            # Long once, it stays so until it is clearly short: a change of the depth costs a bubble of its own.
            self.is_long = least > self._bound / (2 if self.is_long else 1)
