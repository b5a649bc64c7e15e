"""Time of messages between ranks."""

from __future__ import annotations

from ...conf.costs import LinkConfig


class Link:
    """Time of a message of so many bytes, or of a collective in which each rank sends so many."""

    def __init__(self, config: LinkConfig) -> None:
        self._least = config.least_us * 1e-6
        self._ramp = config.ramp_us * 1e-9  # s by root of bytes
        self._rate = config.gbps * 1e9
        self._knee = config.knee

    def seconds(self, size: float) -> float:
        """Of `size` bytes. Plain arithmetic: a numpy array serves as well."""
        moved: float = self._ramp * size**0.5 + size / self._rate
        return (self._least**self._knee + moved**self._knee) ** (1 / self._knee)
