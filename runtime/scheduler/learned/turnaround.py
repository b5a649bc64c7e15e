"""How long even the busiest stage idles per round, and whether one more micro-batch in flight pays off."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

from collections.abc import Sequence

from ...core.messages import Span
from ...core.run_record import MicroBatchRecord

_NEWEST_WEIGHT = 1 / 64  # of the newest micro-batch in the means: low, to ignore single bubbles
_IDLE_SHARE = 1 / 8  # idle share that counts as long, relative to the growth of TBT by one more micro-batch


class Turnaround:
    """Watches the idle time of each stage while as many micro-batches are in flight as there are stages.

    Each stage then idles once per round for the turnaround: activations are in flight between stages, and tokens from
    the last stage back to stage 0. If micro-batches are not all equal, each stage also waits for the longest. One more
    micro-batch in flight hides both, but delays each decode by one stage time: over P stages, TBT grows by 1 / P.

    So it pays off if even the busiest stage idles for more than `_IDLE_SHARE` / P of its time. Other stages idle longer
    only because they are faster, which no depth can fix.
    """

    def __init__(self, num_stages: int) -> None:
        self._busy = [0.0] * num_stages  # mean seconds of a micro-batch, by stage
        self._idle = [0.0] * num_stages  # mean seconds before a micro-batch while there was work, by stage
        self._bound = _IDLE_SHARE / num_stages if num_stages > 1 else 1.0
        self.is_long = False

    def observe(self, micro_batch: MicroBatchRecord, spans: Sequence[Span]) -> None:
        """Learn from the spans of one or several stages that have computed a micro-batch.

        Call it for every micro-batch: all idle time of a round may come before a single one.
        """
        for wait in micro_batch.waits:
            if wait.reason != "depth_full":
                return
        for span in spans:
            stage, seconds = span.stage, span.end - span.begin
            busy = self._busy[stage] or seconds
            self._busy[stage] = busy = busy + _NEWEST_WEIGHT * (seconds - busy)
            idle = min(max(0.0, span.input - span.ready), busy)
            self._idle[stage] += _NEWEST_WEIGHT * (idle - self._idle[stage])
        if spans[-1].stage == len(self._busy) - 1:
            least = min([i / (i + b) if b else 0.0 for i, b in zip(self._idle, self._busy, strict=True)])
            self.is_long = least > self._bound
