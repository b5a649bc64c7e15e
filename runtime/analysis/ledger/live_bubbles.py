"""The idle share of stage time during a run."""

from __future__ import annotations

from ...core.run_record import RunRecord


class LiveBubbles:
    """An estimate of the idle share of a run, for a progress bar.

    It is idle over elapsed time, summed over stages; each stage counts from its first begin to its last end.
    """

    def __init__(self, record: RunRecord) -> None:
        self._record = record
        self._num_spans = 0  # counted so far
        self._stages: dict[int, tuple[float, float, float]] = {}  # first begin, last end, busy

    def fraction(self) -> float:
        """Return the share so far, in 0 to 1; 0 before the first span."""
        for span in self._record.spans[self._num_spans :]:
            first, last, busy = self._stages.get(span.stage, (span.begin, span.end, 0.0))
            self._stages[span.stage] = (min(first, span.begin), max(last, span.end), busy + span.end - span.begin)
        self._num_spans = len(self._record.spans)
        elapsed = sum(last - first for first, last, _ in self._stages.values())
        busy = sum(busy for *_, busy in self._stages.values())
        return min(1.0, max(0.0, 1.0 - busy / elapsed)) if elapsed > 0 else 0.0
