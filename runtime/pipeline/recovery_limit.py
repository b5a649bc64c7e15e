"""The bound on how many faults of a pipeline are repaired within a time."""

from __future__ import annotations

from collections import deque

from .protocol import PipelineError


class RecoveryLimit:
    """Counts faults; more than `most` within `window_s` seconds end the run."""

    def __init__(self, most: int, window_s: float) -> None:
        self._most = most
        self._window_s = window_s
        self._times: deque[float] = deque()

    def count(self, text: str, now: float) -> None:
        """Count a fault, which `text` says in words, at `now` in seconds on the pipeline's clock.

        Raises:
            PipelineError: it is one too many.
        """
        self._times.append(now)
        while self._times[0] < now - self._window_s:
            self._times.popleft()
        if len(self._times) > self._most:
            raise PipelineError(
                f"{text}; it is fault {self._most + 1} within {self._window_s:g} s "
                f"(parallel.max_recoveries={self._most})"
            )
