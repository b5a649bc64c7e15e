"""The limit on pipeline repairs within a time window."""

from __future__ import annotations

from collections import deque

from .protocol import PipelineError


class RecoveryLimit:
    """Counts faults; more than `most` within `window_s` seconds stop the run."""

    def __init__(self, most: int, window_s: float) -> None:
        self._most = most
        self._window_s = window_s
        self._times: deque[float] = deque()

    def count(self, text: str, now: float) -> None:
        """Count a fault, described by `text`, at `now` in seconds on the pipeline's clock.

        Raises:
            PipelineError: the limit is exceeded.
        """
        self._times.append(now)
        while self._times[0] < now - self._window_s:
            self._times.popleft()
        if len(self._times) > self._most:
            raise PipelineError(
                f"{text}; fault {self._most + 1} within {self._window_s:g} s (parallel.max_recoveries={self._most})"
            )
