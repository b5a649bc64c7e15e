"""A chart as data, drawn by `svg.py` on the page and by `png.py` for papers; and how long series are thinned.

A kind says how to read a series: `lines` join (x, y); `steps` hold y until the next x; `cdf` has ascending x and the
share up to it; `histogram` and `areas` (stacked) have one edge more in x than values in y; `bars` (stacked, lying)
have a value a category; `scatter` has points; a `heat` map has a series a row, a value a column, NaN where there is
none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from ..ledger.ledger import Floats, Ints

Kind = Literal["lines", "steps", "cdf", "histogram", "areas", "bars", "scatter", "heat"]
POINTS = 600  # of a thinned series
BINS = 48
SLOTS = 240  # windows of time that an area chart averages over
FEW_NAMES, SHORT_NAME = 5, 14  # points, and letters of their names, that fit beside each other
NUM_COLOURS = 8  # series colours of the style sheet, `s0` and on


@dataclass(frozen=True, slots=True)
class Axis:
    """`low` and `high` fix an end that the data would else set; from 0 unless `low` says otherwise. On a `whole` axis
    only whole numbers are named."""

    label: str
    unit: str = ""
    low: float | None = 0.0
    high: float | None = None
    whole: bool = False

    @property
    def text(self) -> str:
        return f"{self.label} ({self.unit})" if self.unit else self.label


@dataclass(frozen=True, slots=True)
class Series:
    """`colour` is a name of the style sheet. `names` are of single points, shown beside them. `band` are the lowest and
    highest values around each y, where that is a mean. Of points that are not `named` the page tells the name on
    hover."""

    label: str
    x: Floats
    y: Floats
    colour: str
    names: tuple[str, ...] = ()
    band: tuple[Floats, Floats] | None = None
    named: bool = True


@dataclass(frozen=True, slots=True)
class Chart:
    """`name` is the figure's file name. `marks` are named places on x. `categories` are those of bars, and the columns
    of a heat map. `diagonal` draws y = x, `line` joins points (x, y) of a scatter. `shades` are the values
    of a heat map's lightest and darkest cell, where maps share them. `note` says below what a reader must know."""

    name: str
    title: str
    kind: Kind
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    marks: tuple[tuple[str, float], ...] = ()
    categories: tuple[str, ...] = ()
    diagonal: bool = False
    line: tuple[tuple[float, float], ...] = ()
    shades: tuple[float, float] | None = None
    note: str = ""

    @property
    def is_empty(self) -> bool:
        return not any(np.isfinite(series.y).any() for series in self.series if len(series.y))


def numbered(chart: Chart) -> list[Series]:
    """The named points of a scatter, from left to right, where their names would lie on each other: they have numbers
    instead, from 1, and a legend says whose. Else none."""
    named = [series for series in chart.series if series.names and series.named]
    if chart.kind != "scatter" or any(len(series.names) != 1 for series in named):
        return []
    crowded = len(named) > FEW_NAMES or any(len(series.names[0]) > SHORT_NAME for series in named)
    return sorted(named, key=lambda series: float(series.x[0])) if crowded else []


def series_colour(number: int) -> str:
    return f"s{number % NUM_COLOURS}"


def time_unit(seconds: float) -> tuple[str, float]:
    """A unit in which so many seconds read well, and how many of it a second has."""
    return ("s", 1.0) if seconds >= 2.0 else ("ms", 1e3) if seconds >= 2e-3 else ("µs", 1e6)


def longest(arrays: Sequence[Floats]) -> float:
    """The largest of all values; 0 without any."""
    return max((float(values.max()) for values in arrays if len(values)), default=0.0)


def cdf(
    name: str, title: str, what: str, seconds: Mapping[str, Floats], colours: Sequence[str], *, of: str, note: str = ""
) -> Chart:
    """Cumulative distributions of times (`seconds` by label); the legend has the medians. The axis ends at the largest
    p99 x 1.5 where the tail goes far beyond."""
    high = longest(list(seconds.values()))
    tail = max((float(np.percentile(values, 99)) for values in seconds.values() if len(values)), default=high)
    shown = high if high <= 2.5 * tail or tail <= 0 else 1.5 * tail
    unit, factor = time_unit(shown)
    series = []
    for (label, values), colour in zip(seconds.items(), colours, strict=True):
        if len(values):
            x, y = thin_cdf(np.sort(values))
            text = f"{label}: p50 {number_text(float(np.median(values)) * factor)} {unit}"
            series.append(Series(text, x * factor, y, colour))
    if shown < high:
        note = f"{note} The axis ends before the longest, {number_text(high * factor)} {unit}.".strip()
    axis = Axis(what, unit, 0.0, shown * factor if shown < high else None)
    return Chart(name, title, "cdf", axis, Axis(f"share of {of}", "", 0.0, 1.0), tuple(series), note=note)


def histogram(
    name: str, title: str, what: str, seconds: Mapping[str, Floats], colours: Sequence[str], *, of: str
) -> Chart:
    """Distributions of times over common bins, with p50, p90, p99 marked where there is one series; what lies beyond
    1.3 times the largest p99 is in the last bin."""
    arrays = {label: values for label, values in seconds.items() if len(values)}
    if not arrays:
        return Chart(name, title, "histogram", Axis(what), Axis(of), ())
    high = max(1.3 * max(float(np.percentile(values, 99)) for values in arrays.values()), 1e-9)
    most = longest(list(arrays.values()))
    high = most if most <= high else high
    low = min(float(values.min()) for values in arrays.values())
    low = 0.0 if low < 0.3 * high else low
    high = max(high, low + 1e-9)
    unit, factor = time_unit(high)
    fewest = min(len(values) for values in arrays.values())
    bins = min(BINS, max(10, int(2.0 * fewest**0.5)))
    edges = np.linspace(low, high, bins + 1) * factor
    series = []
    for (label, values), colour in zip(seconds.items(), colours, strict=True):
        if len(values):
            counts, _ = np.histogram(np.clip(values, low, high), bins=bins, range=(low, high))
            series.append(Series(label, edges, counts.astype(np.float64), colour))
    marks: tuple[tuple[str, float], ...] = ()
    if len(arrays) == 1:
        (values,) = arrays.values()
        places = np.minimum(np.percentile(values, [50, 90, 99]), high) * factor
        marks = tuple(zip(("p50", "p90", "p99"), places.tolist(), strict=True))
    note = f"The last bin holds all beyond, up to {number_text(most * factor)} {unit}." if most > high else ""
    x, y = Axis(what, unit, low * factor, high * factor), Axis(of, whole=True)
    return Chart(name, title, "histogram", x, y, tuple(series), marks, note=note)


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


def ticks(low: float, high: float, count: int = 5, *, whole: bool = False) -> list[float]:
    """Round (or whole) numbers in [low, high], about `count` of them."""
    if not high > low:
        return [low]
    raw = (high - low) / max(1, count)
    power = 10.0 ** math.floor(math.log10(raw))
    step = power * next(n for n in (1, 2, 2.5, 5, 10) if n * power >= raw * (1 - 1e-9))
    step = max(1.0, float(round(step))) if whole else step
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]


def tick_texts(values: Sequence[float]) -> list[str]:
    """All with as many decimals as their step needs."""
    step = min((abs(b - a) for a, b in pairwise(values)), default=abs(values[0]) if values else 1.0)
    decimals = next((d for d in range(7) if abs(round(step, d) - step) < 1e-6 * max(step, 1e-12)), 6)
    return [f"{value:,.{decimals}f}" if abs(value) > 1e-12 else "0" for value in values]


def number_text(value: float) -> str:
    """Three digits that count."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}" if abs(value) >= 1 else f"{value:.3g}"


def extent(chart: Chart) -> tuple[tuple[float, float], tuple[float, float]]:
    """The ends of x and of y, room above the data included; never empty."""
    xs = np.concatenate([s.x for s in chart.series] or [np.zeros(1)])
    if chart.kind == "areas" or chart.kind == "bars":
        stacked = np.sum([s.y for s in chart.series], axis=0) if chart.series else np.zeros(1)
    else:
        stacked = np.concatenate([s.y if s.band is None else s.band[1] for s in chart.series] or [np.zeros(1)])
    values, places = (stacked, xs) if chart.kind != "bars" else (np.zeros(1), stacked)
    x = _ends(chart.x, places, {"scatter": 0.06, "bars": 0.03}.get(chart.kind, 0.0))
    y = _ends(chart.y, values, 0.06)
    if chart.diagonal:
        x = y = min(x[0], y[0]), max(x[1], y[1])
    return x, y


def _ends(axis: Axis, values: Floats, room: float) -> tuple[float, float]:
    values = values[np.isfinite(values)]
    least, most = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    margin = room * (most - min(least, axis.low if axis.low is not None else least))
    low = axis.low if axis.low is not None else least - margin
    high = axis.high if axis.high is not None else most + margin
    return (low, high) if high > low else (low, low + 1.0)
