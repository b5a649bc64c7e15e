"""Streaming quantiles."""

from __future__ import annotations

import math

import numpy as np

from ...core.micro_batch_columns import Floats


class Quantiles:
    """Streaming statistics of positive values in bounded memory, by a histogram with logarithmic bins.

    Args:
        resolution: ratio of a bin's width to its values; a quantile is off by half of it at most.
        least: values below it share the first bin.
        most: values above it share the last bin.
    """

    def __init__(self, resolution: float = 0.002, least: float = 1e-6, most: float = 1e12) -> None:
        self._least = math.log(least)
        self._width = math.log1p(resolution)
        self._counts = np.zeros(int((math.log(most) - self._least) / self._width) + 2, np.int64)
        self._sum = self._squares = 0.0

    def add(self, values: Floats) -> None:
        """Count values; those out of range are clamped to the first or last bin."""
        logs = np.log(np.maximum(values, 1e-300))
        bins = np.clip((logs - self._least) / self._width + 1, 0, len(self._counts) - 1).astype(np.int64)
        self._counts += np.bincount(bins, minlength=len(self._counts))
        self._sum += float(values.sum())
        self._squares += float(np.square(values).sum())

    def merge(self, other: Quantiles) -> None:
        """Count all values of `other`, which has the same bins."""
        self._counts += other._counts
        self._sum += other._sum
        self._squares += other._squares

    @property
    def count(self) -> int:
        """How many values have been counted."""
        return int(self._counts.sum())

    def quantile(self, share: float) -> float:
        """Return the value below which this share of the values lies; 0 without values."""
        if not self.count:
            return 0.0
        place = int(np.searchsorted(np.cumsum(self._counts), share * (self.count - 1), side="right"))
        return math.exp(self._least + (place - 0.5) * self._width) if place else 0.0

    @property
    def mean(self) -> float:
        """The mean, exact; 0 without values."""
        return self._sum / self.count if self.count else 0.0

    @property
    def std(self) -> float:
        """The standard deviation of all values, exact but for rounding; 0 without values."""
        return math.sqrt(max(0.0, self._squares / self.count - self.mean**2)) if self.count else 0.0

    def statistics(self) -> dict[str, float]:
        """Return the statistics that a summary reports for a latency."""
        return {
            "mean": self.mean,
            "median": self.quantile(0.5),
            "std": self.std,
            "p90": self.quantile(0.9),
            "p99": self.quantile(0.99),
        }
