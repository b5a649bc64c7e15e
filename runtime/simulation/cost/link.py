"""Predicts the time of messages between ranks."""

from __future__ import annotations

from ....conf.costs import LinkConfig


class Link:
    """Predicts the time of a message between two ranks, or of a collective in which each rank sends a message.

    `least_seconds` is the time of a message of no bytes.
    """

    def __init__(self, config: LinkConfig) -> None:
        self.least_seconds = config.least_us * 1e-6
        self._ramp = config.ramp_us * 1e-9  # seconds per square root of bytes
        self._bytes_per_second = config.gigabytes_per_s * 1e9
        self._norm_order = config.knee

    def seconds(self, size: float) -> float:
        """Return the seconds for a message of `size` bytes. `size` may be a numpy array."""
        moving: float = self._ramp * size**0.5 + size / self._bytes_per_second
        order = self._norm_order
        seconds: float = (self.least_seconds**order + moving**order) ** (1 / order)
        return seconds


class FasterLink:
    """Predicts the time of a collective with the faster of two implementations; the second may be None."""

    def __init__(self, config: LinkConfig, other: LinkConfig | None) -> None:
        self._links = [Link(each) for each in (config, other) if each is not None]

    def seconds(self, size: float) -> float:
        """Return the seconds of a collective in which each rank sends `size` bytes."""
        return min([link.seconds(size) for link in self._links])
