"""Interpolates measured times: between the points that were measured, and beyond them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Mapping, Sequence
from math import exp, log
from statistics import median
from typing import TypeVar

K = TypeVar("K", bound=Hashable)

_NUM_SLOPE_POINTS = 4  # last points of a curve, to which the slope beyond them is fitted


class Curve:
    """Predicts seconds as a function of a size.

    Between measured points the function is linear. Beyond the last point it continues with the slope of the last few.
    Below the first point it is constant.

    Raises:
        ValueError: no points.
    """

    def __init__(self, points: Mapping[int, float]) -> None:
        if not points:
            raise ValueError("no points")
        self.sizes = sorted(points)
        self.seconds = [points[size] for size in self.sizes]
        self._slope = _fit_slope(self.sizes[-_NUM_SLOPE_POINTS:], self.seconds[-_NUM_SLOPE_POINTS:])

    def __call__(self, size: float) -> float:
        """Return the seconds of a size: interpolated, beyond the largest extrapolated, below the smallest constant."""
        sizes, seconds = self.sizes, self.seconds
        if size >= sizes[-1]:
            return seconds[-1] + (size - sizes[-1]) * self._slope
        at = bisect_right(sizes, size)
        if at == 0:
            return seconds[0]
        low, high = sizes[at - 1], sizes[at]
        return seconds[at - 1] + (seconds[at] - seconds[at - 1]) * (size - low) / (high - low)


def _fit_slope(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """Return seconds per unit of size, by least squares: at least 0, at most the last point's seconds / size."""
    if len(sizes) == 1:
        return max(0.0, seconds[0] / max(sizes[0], 1))
    x, y = sum(sizes) / len(sizes), sum(seconds) / len(seconds)
    slope = sum((s - x) * (t - y) for s, t in zip(sizes, seconds, strict=True)) / sum((s - x) ** 2 for s in sizes)
    return min(max(0.0, slope), seconds[-1] / sizes[-1])


class ChunkAttention:
    """Predicts the seconds of a chunk's attention as a function of its length and prefix.

    Time is linear in the prefix, like the number of keys read. Between two measured lengths it is a power law in the
    length: the exponent is between 0 (all overhead) and 2 (a causal triangle). Beyond the longest measured length it is
    proportional to the work, length * (prefix + length / 2).

    Chunks without a prefix have their own curve, since kernels compute a causal triangle without reading a mask.

    Args:
        points: seconds by (length, prefix).

    Raises:
        ValueError: no points without a prefix.
    """

    def __init__(self, points: Mapping[tuple[int, int], float]) -> None:
        self._without_prefix = _PowerLaw({length: t for (length, prefix), t in points.items() if prefix == 0})
        by_length: dict[int, dict[int, float]] = {}
        for (length, prefix), seconds in points.items():
            if prefix > 0:
                by_length.setdefault(length, {})[prefix] = seconds
        curves = {length: Curve(by_prefix) for length, by_prefix in by_length.items() if len(by_prefix) >= 2}
        self._lengths = sorted(curves)
        self._curves = [curves[length] for length in self._lengths]

    def __call__(self, length: int, prefix: int) -> float:
        """Return the seconds of a chunk of `length` tokens after `prefix` tokens; longer ones are scaled by work."""
        lengths = self._lengths
        if prefix == 0 or not lengths:
            seconds = self._without_prefix(length)
            return seconds * (prefix + length / 2) / (length / 2) if prefix else seconds
        at = bisect_right(lengths, length)
        if at == len(lengths):
            work_ratio = length * (prefix + length / 2) / (lengths[-1] * (prefix + lengths[-1] / 2))
            return self._curves[-1](prefix) * work_ratio
        if at == 0:
            return self._curves[0](prefix)
        shorter, longer = self._curves[at - 1](prefix), self._curves[at](prefix)
        return _power_law(lengths[at - 1], shorter, lengths[at], longer, length)


class _PowerLaw:
    """Predicts seconds by a chunk's length: power laws between measured points, quadratic beyond the last."""

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
        return _power_law(lengths[at - 1], seconds[at - 1], lengths[at], seconds[at], length)


def _power_law(low: int, seconds_at_low: float, high: int, seconds_at_high: float, size: float) -> float:
    """Evaluate the power law through two points at `size`."""
    return seconds_at_low * exp(log(seconds_at_high / seconds_at_low) * log(size / low) / log(high / low))


class DecodeAttention:
    """Predicts the seconds of decodes' attention as a function of their number and their total context.

    The time of one decode is linear in the mean context. Between two measured numbers of decodes it is linear in the
    number's logarithm. The time of all decodes is their number times the time of one.

    Args:
        points: seconds by (number of decodes, context of each).

    Raises:
        ValueError: no points.
    """

    def __init__(self, points: Mapping[tuple[int, int], float]) -> None:
        by_number: dict[int, dict[int, float]] = {}
        for (number, context), seconds in points.items():
            by_number.setdefault(number, {})[context] = seconds / number
        max_contexts = max((len(by_context) for by_context in by_number.values()), default=0)
        curves = {
            number: Curve(by_context) for number, by_context in by_number.items() if 2 * len(by_context) > max_contexts
        }
        if not curves:
            raise ValueError("no points")
        self._numbers = sorted(curves)
        self._curves = [curves[number] for number in self._numbers]

    def __call__(self, requests: int, context: int) -> float:
        """Return the seconds of `requests` decodes over `context` KV tokens in total, as if evenly split."""
        numbers, mean_context = self._numbers, context / requests
        at = bisect_right(numbers, requests)
        if at == 0 or at == len(numbers):
            return requests * self._curves[min(at, len(numbers) - 1)](mean_context)
        low, high = numbers[at - 1], numbers[at]
        share = log(requests / low) / log(high / low)
        return requests * ((1 - share) * self._curves[at - 1](mean_context) + share * self._curves[at](mean_context))


def medians(pairs: Iterable[tuple[K, float]]) -> dict[K, float]:
    """Return the median of each key's values."""
    by_key: dict[K, list[float]] = {}
    for key, value in pairs:
        by_key.setdefault(key, []).append(value)
    return {key: median(values) for key, values in by_key.items()}
