"""How long series are thinned to what a chart can show."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..ledger.ledger import Floats, Ints
from .chart import Series

POINTS = 600  # of a thinned series
SLOTS = 240  # stretches of time that an area chart averages over


def thin(x: Floats, y: Floats, points: int = POINTS) -> tuple[Floats, Floats]:
    """Of a long series the first, the last, and the smallest and largest y of each stretch, in order."""
    if len(x) <= points:
        return x, y
    bounds = np.linspace(0, len(x), points // 2 + 1).astype(np.int64)
    starts = bounds[:-1]
    kept = {0, len(x) - 1}
    for a, b in zip(starts.tolist(), bounds[1:].tolist(), strict=True):
        kept |= {a + int(y[a:b].argmin()), a + int(y[a:b].argmax())}
    index = np.array(sorted(kept))
    return x[index], y[index]


def thin_cdf(values: Floats, points: int = POINTS) -> tuple[Floats, Floats]:
    """Sorted values and the share up to each; of many, evenly spaced ones with both ends."""
    index = np.linspace(0, len(values) - 1, min(points, len(values))).astype(np.int64)
    return values[index], (index + 1) / len(values)


def thin_points(x: Floats, y: Floats, cells: int = 64) -> tuple[Floats, Floats]:
    """One point a cell of a square grid, the extremes of both axes among them."""
    if len(x) <= cells * 4:
        return x, y

    def cell(values: Floats) -> Ints:
        low, high = float(values.min()), float(values.max())
        return np.minimum(((values - low) / max(high - low, 1e-12) * cells).astype(np.int64), cells - 1)

    _, first = np.unique(cell(x) * cells + cell(y), return_index=True)
    index = np.union1d(first, [x.argmin(), x.argmax(), y.argmin(), y.argmax()])
    return x[index], y[index]


def counter(label: str, at: Floats, values: Floats, colour: str) -> Series:
    """A series of values that hold from one of the moments `at` to the next; of many the means over windows of time,
    in a band of their extremes."""
    if len(at) <= POINTS:
        return Series(label, at, values, colour)
    edges = np.linspace(float(at[0]), float(at[-1]), SLOTS + 1)
    place = np.clip(np.searchsorted(edges, at, side="right") - 1, 0, SLOTS - 1)
    low, high = np.full(SLOTS, np.inf), np.full(SLOTS, -np.inf)
    np.minimum.at(low, place, values)
    np.maximum.at(high, place, values)
    kept = np.isfinite(low)
    mean = np.bincount(place, weights=values, minlength=SLOTS)[kept] / np.bincount(place, minlength=SLOTS)[kept]
    return Series(label, edges[:-1][kept], mean, colour, band=(low[kept], high[kept]))


def average_over_time(
    at: Floats, values: Sequence[Floats], end: float, slots: int = SLOTS
) -> tuple[Floats, list[Floats], bool]:
    """Edges, and of each of `values` (one a micro-batch, at ascending times) what is shown between them: each value
    until the next time, or of many the mean over windows of time, 0 where nothing lies (then True)."""
    if len(at) <= slots:
        return np.append(at, max(end, float(at[-1]) if len(at) else end)), list(values), False
    edges = np.linspace(float(at[0]), max(end, float(at[-1])), slots + 1)
    place = np.clip(np.searchsorted(edges, at, side="right") - 1, 0, slots - 1)
    count = np.maximum(np.bincount(place, minlength=slots), 1)
    return edges, [np.bincount(place, weights=v, minlength=slots) / count for v in values], True
