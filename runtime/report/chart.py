"""A chart as data. `svg.py` draws it on a page, `png.py` draws it for a paper.

The kind of a chart says how its series are read:

- `lines`: straight lines through the points (x, y).
- `steps`: y holds until the next x.
- `cdf`: x ascends; y is the share of values up to x.
- `histogram`: y are counts; x are the edges of the bins, one more than counts.
- `areas`: stacked; y are heights; x are the edges between them, one more than heights.
- `bars`: stacked and horizontal; y has a value for each category of the chart.
- `scatter`: points (x, y).
- `heat`: each series is a row, y has a value for each column, NaN for an empty cell.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ..core.micro_batch_columns import Floats
from .formatting import number_text

Kind = Literal["lines", "steps", "cdf", "histogram", "areas", "bars", "scatter", "heat"]
_MAX_NAMES, _MAX_NAME_LETTERS = 5, 14  # names of points that fit into a scatter plot: how many, how long
_MAX_GROWTH = 2.0  # share of the data's range by which an axis grows at most to hold a mark
_NUM_COLOURS = 8  # the style sheet's series colours, `s0` to `s7`


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of a chart.

    Attributes:
        label: What the axis shows.
        unit: Unit of its values; empty if they have none.
        low: Lower end; None: the data sets it.
        high: Upper end; None: the data sets it.
        whole: Only whole numbers get a tick.
    """

    label: str
    unit: str = ""
    low: float | None = 0.0
    high: float | None = None
    whole: bool = False

    @property
    def text(self) -> str:
        """The label with its unit."""
        return f"{self.label} ({self.unit})" if self.unit else self.label


@dataclass(frozen=True, slots=True)
class Series:
    """One series of a chart.

    Attributes:
        label: Its name in the legend; empty: it has no entry.
        x, y: Its values; the chart's kind says how they are read.
        colour: Name of a colour in the style sheet.
        names: Names of single points of a scatter.
        band: Lowest and highest values around each y, if y are means.
        shows_names: Names are written beside their points. If not, the page shows them on hover.
        number: Number that stands for the name of a point where names are too many or too long.
    """

    label: str
    x: Floats
    y: Floats
    colour: str
    names: tuple[str, ...] = ()
    band: tuple[Floats, Floats] | None = None
    shows_names: bool = True
    number: int | None = None


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart, drawn by `svg.figure` and `png.write_figures`.

    Attributes:
        name: File name of the figure, without its suffix.
        title: Heading of the figure.
        kind: How the series are read and drawn.
        x, y: The axes.
        series: What is drawn.
        marks: Vertical lines, each a name and its place on x. The x axis grows to hold them; `placed_marks` says what
            is drawn for one that is too far off.
        categories: Names of the bars, or of the columns of a heat map.
        diagonal: Draws the line y = x.
        line: Points (x, y) of a scatter that a line joins.
        shades: Values of the lightest and of the darkest cell of a heat map; None: its own extremes.
        note: Text below the chart.
    """

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
        """Whether there is no value to draw."""
        return not any(np.isfinite(series.y).any() for series in self.series if len(series.y))


def numbered_points(chart: Chart) -> list[tuple[int, Series]]:
    """Return the points of a scatter that are drawn with a number in place of their name, each with its number.

    A series' own number is the same in all charts of a page. Series without one are numbered from left to right. The
    legend says which name each number stands for. Numbers are used if the names are too many or too long to be written
    beside the points. Otherwise the list is empty.
    """
    named = [series for series in chart.series if series.names and series.shows_names]
    if chart.kind != "scatter" or any(len(series.names) != 1 for series in named):
        return []
    crowded = len(named) > _MAX_NAMES or any(len(series.names[0]) > _MAX_NAME_LETTERS for series in named)
    if not crowded:
        return []
    from_left = sorted(named, key=lambda series: float(series.x[0]))
    numbers = ((series.number or place, series) for place, series in enumerate(from_left, 1))
    return sorted(numbers, key=lambda pair: pair[0])


@dataclass(frozen=True, slots=True)
class PlacedMark:
    """A mark as it is drawn.

    Attributes:
        text: Its name; for one beyond an end of the axis also its value, with an arrow that points there.
        place: Its place on x, or the end of the axis that it is beyond.
        beyond: -1 and 1 if it is beyond the lower and the upper end, 0 if it is on the axis.
    """

    text: str
    place: float
    beyond: Literal[-1, 0, 1] = 0


def placed_marks(chart: Chart) -> list[PlacedMark]:
    """Return the marks of a chart. One that is not on the axis is an arrow at its end with the true value."""
    (low, high), _ = extent(chart)
    placed = []
    for name, value in chart.marks:
        text = f"{name} {number_text(value)} {chart.x.unit}".rstrip()
        if value > high:
            placed.append(PlacedMark(f"{text} \N{RIGHTWARDS ARROW}", high, 1))
        elif value < low:
            placed.append(PlacedMark(f"\N{LEFTWARDS ARROW} {text}", low, -1))
        else:
            placed.append(PlacedMark(name, value))
    return placed


def series_colour(number: int) -> str:
    """Return the style sheet's name of the colour of series `number`; colours repeat."""
    return f"s{number % _NUM_COLOURS}"


def ticks(low: float, high: float, count: int = 5, *, whole: bool = False) -> list[float]:
    """Return about `count` round numbers in [low, high], whole numbers if `whole`."""
    if not high > low:
        return [low]
    even = (high - low) / max(1, count)
    power = 10.0 ** math.floor(math.log10(even))
    distance = power * next(n for n in (1, 2, 2.5, 5, 10) if n * power >= even * (1 - 1e-9))
    distance = max(1.0, float(round(distance))) if whole else distance
    first = math.ceil(low / distance - 1e-9)
    return [n * distance for n in range(first, math.floor(high / distance + 1e-9) + 1)]


def extent(chart: Chart) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the ends (low, high) of x and of y, with some room beyond the data; low is always below high."""
    xs = np.concatenate([s.x for s in chart.series] or [np.zeros(1)])
    if chart.kind == "areas" or chart.kind == "bars":
        stacked = np.sum([s.y for s in chart.series], axis=0) if chart.series else np.zeros(1)
    else:
        stacked = np.concatenate([s.y if s.band is None else s.band[1] for s in chart.series] or [np.zeros(1)])
    values, places = (stacked, xs) if chart.kind != "bars" else (np.zeros(1), stacked)
    near = _marks_near(chart, places)
    x = _ends(chart.x, np.append(places, near), {"scatter": 0.06, "bars": 0.03}.get(chart.kind, 0.0))
    y = _ends(chart.y, values, 0.06)
    if chart.kind == "scatter":  # a point is never drawn at a place that is not its own
        x, y = _holding(x, places), _holding(y, values)
    if chart.diagonal:
        x = y = min(x[0], y[0]), max(x[1], y[1])
    return x, y


def _marks_near(chart: Chart, values: Floats) -> list[float]:
    """Return the marks that the x axis grows to hold: those not much farther from the values than these span."""
    values = values[np.isfinite(values)]
    if not len(values):
        return [value for _, value in chart.marks]
    lowest, highest = float(values.min()), float(values.max())
    lowest = lowest if chart.x.low is None else min(lowest, chart.x.low)
    reach = _MAX_GROWTH * (highest - lowest)
    return [value for _, value in chart.marks if lowest - reach <= value <= highest + reach]


def _holding(ends: tuple[float, float], values: Floats) -> tuple[float, float]:
    """Return the ends of an axis moved apart, where needed, so that all values are between them."""
    values = values[np.isfinite(values)]
    return min(ends[0], float(values.min(initial=ends[0]))), max(ends[1], float(values.max(initial=ends[1])))


def _ends(axis: Axis, values: Floats, room: float) -> tuple[float, float]:
    """Return the ends of an axis; `room` is the share of the data's range that is added where the data sets an end."""
    values = values[np.isfinite(values)]
    lowest, highest = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    margin = room * (highest - min(lowest, axis.low if axis.low is not None else lowest))
    low = axis.low if axis.low is not None else lowest - margin
    high = axis.high if axis.high is not None else highest + margin
    return (low, high) if high > low else (low, low + 1.0)
