"""Thins long series to the number of points that a chart can show."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...core.micro_batch_columns import Floats, Ints
from .chart import Series

MAX_POINTS = 600
_CELLS = 64  # grid cells per axis of a scatter plot
NUM_INTERVALS = 240  # time intervals over which a long series is averaged


def thin(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Thin a long series: keep its first and last point, and the minimum and maximum y of each section."""
    if len(x) <= MAX_POINTS:
        return x, y
    bounds = np.linspace(0, len(x), MAX_POINTS // 2 + 1).astype(np.int64)
    starts = bounds[:-1]
    kept = {0, len(x) - 1}
    for a, b in zip(starts.tolist(), bounds[1:].tolist(), strict=True):
        kept |= {a + int(y[a:b].argmin()), a + int(y[a:b].argmax())}
    index = np.array(sorted(kept))
    return x[index], y[index]


def thin_cdf(values: Floats) -> tuple[Floats, Floats]:
    """Return the points of the empirical CDF of ascending values: some of the values, and the share up to each.

    The kept values are evenly spaced in rank and include both ends.
    """
    index = np.linspace(0, len(values) - 1, min(MAX_POINTS, len(values))).astype(np.int64)
    return values[index], (index + 1) / len(values)


def thin_points(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Thin a scatter plot: keep one point per cell of a grid, and the extremes of both axes."""
    if len(x) <= _CELLS * 4:
        return x, y

    def cell(values: Floats) -> Ints:
        low, high = float(values.min()), float(values.max())
        return np.minimum(((values - low) / max(high - low, 1e-12) * _CELLS).astype(np.int64), _CELLS - 1)

    _, first = np.unique(cell(x) * _CELLS + cell(y), return_index=True)
    index = np.union1d(first, [x.argmin(), x.argmax(), y.argmin(), y.argmax()])
    return x[index], y[index]


def counter(label: str, at: Floats, values: Floats, colour: str) -> Series:
    """Build the series of a counter: each value holds from its time in `at` to the next.

    A long series is averaged over time intervals, with the extremes of each interval as its band.
    """
    if len(at) <= MAX_POINTS:
        return Series(label, at, values, colour)
    edges, place = _intervals(at, float(at[-1]))
    low, high = np.full(NUM_INTERVALS, np.inf), np.full(NUM_INTERVALS, -np.inf)
    np.minimum.at(low, place, values)
    np.maximum.at(high, place, values)
    kept = np.isfinite(low)
    counts = np.bincount(place, minlength=NUM_INTERVALS)[kept]
    mean = np.bincount(place, weights=values, minlength=NUM_INTERVALS)[kept] / counts
    return Series(label, edges[:-1][kept], mean, colour, band=(low[kept], high[kept]))


def average_over_time(at: Floats, values: Sequence[Floats], end: float) -> tuple[Floats, list[Floats], bool]:
    """Average values over time intervals, if there are more values than `NUM_INTERVALS`.

    Args:
        at: Ascending times of the values.
        values: Arrays with one value per time.
        end: End of the last interval.

    Returns:
        The edges of the intervals; the value of each array in each interval, 0 in an interval without a time; and
        whether the values are averages. If not, each value holds until the next time.
    """
    end = max(end, float(at[-1]) if len(at) else end)
    if len(at) <= NUM_INTERVALS:
        return np.append(at, end), list(values), False
    edges, place = _intervals(at, end)
    count = np.maximum(np.bincount(place, minlength=NUM_INTERVALS), 1)
    return edges, [np.bincount(place, weights=v, minlength=NUM_INTERVALS) / count for v in values], True


def _intervals(at: Floats, end: float) -> tuple[Floats, Ints]:
    """Return the edges of intervals from the first time to `end`, and the index of the interval of each time."""
    edges = np.linspace(float(at[0]), end, NUM_INTERVALS + 1)
    return edges, np.clip(np.searchsorted(edges, at, side="right") - 1, 0, NUM_INTERVALS - 1)
