"""The mean output length of finished requests."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations


class OutputLengths:
    """Counts finished requests and their output tokens."""

    def __init__(self) -> None:
        self._num_requests = 0
        self._num_tokens = 0

    def finished(self, num_output: int) -> None:
        """Count a request that ended after `num_output` tokens."""
        self._num_requests += 1
        self._num_tokens += num_output

    @property
    def is_known(self) -> bool:
        return self._num_requests > 0

    def times_mean(self, factor: float) -> float:
        """Return `factor` times the mean output length."""
        assert self.is_known
        return factor * self._num_tokens / self._num_requests
