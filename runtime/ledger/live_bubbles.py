"""The idle share of stage time while a run goes on."""

from __future__ import annotations

from ..core.messages import Span


class LiveBubbles:
    """An estimate of the idle share, for a progress bar.

    It is idle over elapsed time of each stage, from its first begin to its last end.
    """

    def __init__(self) -> None:
        self._stages: dict[int, tuple[float, float, float]] = {}  # first begin, last end, busy

    def add(self, span: Span) -> None:
        """Count a span as busy time of its stage."""
        first, last, busy = self._stages.get(span.stage, (span.begin, span.end, 0.0))
        self._stages[span.stage] = (min(first, span.begin), max(last, span.end), busy + span.end - span.begin)

    @property
    def bubble_fraction(self) -> float:
        """0 before the first span."""
        elapsed = sum(last - first for first, last, _ in self._stages.values())
        busy = sum(busy for *_, busy in self._stages.values())
        return min(1.0, max(0.0, 1.0 - busy / elapsed)) if elapsed > 0 else 0.0
