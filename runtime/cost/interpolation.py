"""Interpolates measured times: between the points that were measured, and beyond them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Mapping, Sequence
from math import exp, log
from statistics import median
from typing import TypeVar

K = TypeVar("K", bound=Hashable)

_FEW = 4  # points at the end of a curve that tell its slope beyond


class Curve:
    """Seconds over a size: linear between the points measured, and beyond the last as the last few say; below the
    first as long as that.

    Raises:
        ValueError: no points.
    """

    def __init__(self, points: Mapping[int, float]) -> None:
        if not points:
            raise ValueError("no points")
        self.sizes = sorted(points)
        self.seconds = [points[size] for size in self.sizes]
        self._beyond = _slope(self.sizes[-_FEW:], self.seconds[-_FEW:])

    def __call__(self, size: float) -> float:
        sizes, seconds = self.sizes, self.seconds
        if size >= sizes[-1]:
            return seconds[-1] + (size - sizes[-1]) * self._beyond
        at = bisect_right(sizes, size)
        if at == 0:
            return seconds[0]
        low, high = sizes[at - 1], sizes[at]
        return seconds[at - 1] + (seconds[at] - seconds[at - 1]) * (size - low) / (high - low)


def _slope(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """Seconds a unit of size, by least squares, at most what a proportional law has and never negative."""
    if len(sizes) == 1:
        return max(0.0, seconds[0] / max(sizes[0], 1))
    x, y = sum(sizes) / len(sizes), sum(seconds) / len(seconds)
    slope = sum((s - x) * (t - y) for s, t in zip(sizes, seconds, strict=True)) / sum((s - x) ** 2 for s in sizes)
    return min(max(0.0, slope), seconds[-1] / sizes[-1])


class ChunkAttention:
    """Seconds of a chunk's attention over its length and prefix.

    Over the prefix it is linear, as the keys that are read. Over the length it is a power law between two lengths
    measured, whose exponent lies between that of overhead (0) and that of the triangle of a prompt (2); beyond the
    longest the work, length x (prefix + length / 2), says. A chunk without a prefix has a curve of its own: its mask
    is the triangle itself, which kernels take without reading a mask.
    """

    def __init__(self, points: Mapping[tuple[int, int], float]) -> None:
        self._bare = _PowerLaw({length: t for (length, prefix), t in points.items() if prefix == 0})
        by_length: dict[int, dict[int, float]] = {}
        for (length, prefix), seconds in points.items():
            if prefix > 0:
                by_length.setdefault(length, {})[prefix] = seconds
        rows = {length: Curve(some) for length, some in by_length.items() if len(some) >= 2}
        self._lengths = sorted(rows)
        self._curves = [rows[length] for length in self._lengths]

    def __call__(self, length: int, prefix: int) -> float:
        lengths = self._lengths
        if prefix == 0 or not lengths:
            seconds = self._bare(length)
            return seconds * (prefix + length / 2) / (length / 2) if prefix else seconds
        at = bisect_right(lengths, length)
        if at == len(lengths):
            work = length * (prefix + length / 2) / (lengths[-1] * (prefix + lengths[-1] / 2))
            return self._curves[-1](prefix) * work
        if at == 0:
            return self._curves[0](prefix)
        return _between(lengths[at - 1], self._curves[at - 1](prefix), lengths[at], self._curves[at](prefix), length)


class _PowerLaw:
    """Seconds over a chunk's length where it has no prefix."""

    def __init__(self, points: Mapping[int, float]) -> None:
        if not points:
            raise ValueError("no points")
        self._lengths = sorted(points)
        self._seconds = [points[length] for length in self._lengths]

    def __call__(self, length: int) -> float:
        lengths, seconds = self._lengths, self._seconds
        at = bisect_right(lengths, length)
        if at == len(lengths):
            return seconds[-1] * (length / lengths[-1]) ** 2
        if at == 0:
            return seconds[0]
        return _between(lengths[at - 1], seconds[at - 1], lengths[at], seconds[at], length)


def _between(low: int, at_low: float, high: int, at_high: float, size: float) -> float:
    """The power law through two points."""
    return at_low * exp(log(at_high / at_low) * log(size / low) / log(high / low))


class DecodeAttention:
    """Seconds of decodes' attention: their number times that of one, which is linear in the context that each has on
    average, and between numbers measured goes with their logarithm."""

    def __init__(self, points: Mapping[tuple[int, int], float]) -> None:
        """`points`: seconds by number of decodes and context of each."""
        by_number: dict[int, dict[int, float]] = {}
        for (number, context), seconds in points.items():
            by_number.setdefault(number, {})[context] = seconds / number
        most = max((len(some) for some in by_number.values()), default=0)
        rows = {number: Curve(some) for number, some in by_number.items() if 2 * len(some) > most}
        if not rows:
            raise ValueError("no points")
        self._numbers = sorted(rows)
        self._curves = [rows[number] for number in self._numbers]

    def __call__(self, requests: int, context: int) -> float:
        numbers, each = self._numbers, context / requests
        at = bisect_right(numbers, requests)
        if at == 0 or at == len(numbers):
            return requests * self._curves[min(at, len(numbers) - 1)](each)
        low, high = numbers[at - 1], numbers[at]
        share = log(requests / low) / log(high / low)
        return requests * ((1 - share) * self._curves[at - 1](each) + share * self._curves[at](each))


def medians(pairs: Iterable[tuple[K, float]]) -> dict[K, float]:
    """The median of each key's values."""
    by_key: dict[K, list[float]] = {}
    for key, seconds in pairs:
        by_key.setdefault(key, []).append(seconds)
    return {key: median(some) for key, some in by_key.items()}
