"""A chart as data, drawn by `svg.py` on the page and by `png.py` for papers.

A kind says how to read a series: `lines` join (x, y); `steps` hold y until the next x; `cdf` has ascending x and the
share up to it; `histogram` and `areas` (stacked) have one edge more in x than values in y; `bars` (stacked, lying)
have a value a category; `scatter` has points; a `heat` map has a series a row, a value a column, NaN where there is
none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ..ledger.ledger import Floats

Kind = Literal["lines", "steps", "cdf", "histogram", "areas", "bars", "scatter", "heat"]
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
