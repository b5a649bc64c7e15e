"""A chart as data. `layout.py` lays it out; `svg.py` draws that on a page, `png.py` for a paper or a notebook.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ..core.micro_batch_columns import Floats

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
        name: Name of a scatter's point, if the series has one only.
        band: Lowest and highest values around each y, if y are means.
        shows_name: The name is written beside the point. If not, the page shows it on hover.
        number: Number that stands for the name where names are too many or too long.
    """

    label: str
    x: Floats
    y: Floats
    colour: str
    name: str = ""
    band: tuple[Floats, Floats] | None = None
    shows_name: bool = True
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
        marks: Vertical lines, each a name and its place on x. The x axis grows to hold them; one that is too far off is
            an arrow at the end of the axis, with its true value.
        categories: Names of the bars, or of the columns of a heat map.
        line: Points (x, y) that a line joins behind those of a scatter.
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
    line: tuple[tuple[float, float], ...] = ()
    shades: tuple[float, float] | None = None
    note: str = ""

    @property
    def is_empty(self) -> bool:
        """Whether there is no value to draw."""
        return not any(np.isfinite(series.y).any() for series in self.series if len(series.y))


def stacked_bars(
    name: str, title: str, x: Axis, rows: Sequence[tuple[str, Mapping[str, float]]], colours: Mapping[str, str]
) -> Chart:
    """Make a chart of bars.

    Args:
        name: File name of the figure.
        title: Heading of the figure.
        x: The axis of the bars' lengths.
        rows: The label of each bar and its parts: a length by name.
        colours: The colour of each part by name, in their order. Parts that no bar has are left out.
    """
    series = tuple(
        Series(part, np.zeros(len(rows)), np.array([row.get(part, 0.0) for _, row in rows]), colour)
        for part, colour in colours.items()
        if any(row.get(part, 0.0) > 0 for _, row in rows)
    )
    return Chart(name, title, "bars", x, Axis(""), series, categories=tuple(label for label, _ in rows))


def numbered_points(chart: Chart) -> list[tuple[int, Series]]:
    """Return the points of a scatter that are drawn with a number in place of their name, each with its number.

    A series' own number is the same in all charts of a page. Series without one are numbered from left to right. The
    legend says which name each number stands for. Numbers are used if the names are too many or too long to be written
    beside the points. Otherwise the list is empty.
    """
    named = [series for series in chart.series if series.name and series.shows_name]
    if len(named) <= _MAX_NAMES and all(len(series.name) <= _MAX_NAME_LETTERS for series in named):
        return []
    from_left = sorted(named, key=lambda series: float(series.x[0]))
    numbers = ((series.number or place, series) for place, series in enumerate(from_left, 1))
    return sorted(numbers, key=lambda pair: pair[0])


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
    """Return the ends (low, high) of x and of y of a chart that has data, with some room beyond the data.

    Low is always below high.
    """
    places = np.concatenate([series.x for series in chart.series])
    if chart.kind in ("areas", "bars"):
        values: Floats = np.sum([series.y for series in chart.series], axis=0)
    else:
        values = np.concatenate([series.y if series.band is None else series.band[1] for series in chart.series])
    if chart.kind == "bars":
        places, values = values, np.zeros(1)
    places, values = places[np.isfinite(places)], values[np.isfinite(values)]
    near = _marks_near(chart, places)
    x = _ends(chart.x, np.append(places, near), {"scatter": 0.06, "bars": 0.03}.get(chart.kind, 0.0))
    y = _ends(chart.y, values, 0.06)
    if chart.kind == "scatter":  # a point is never drawn at a place that is not its own
        x = min(x[0], float(places.min())), max(x[1], float(places.max()))
        y = min(y[0], float(values.min())), max(y[1], float(values.max()))
    return x, y


def _marks_near(chart: Chart, values: Floats) -> list[float]:
    """Return the marks that the x axis grows to hold: those not much farther from the values than these span."""
    lowest, highest = float(values.min()), float(values.max())
    lowest = lowest if chart.x.low is None else min(lowest, chart.x.low)
    reach = _MAX_GROWTH * (highest - lowest)
    return [value for _, value in chart.marks if lowest - reach <= value <= highest + reach]


def _ends(axis: Axis, values: Floats, room: float) -> tuple[float, float]:
    """Return the ends of an axis; `room` is the share of the data's range that is added where the data sets an end."""
    lowest, highest = float(values.min()), float(values.max())
    margin = room * (highest - min(lowest, axis.low if axis.low is not None else lowest))
    low = axis.low if axis.low is not None else lowest - margin
    high = axis.high if axis.high is not None else highest + margin
    return (low, high) if high > low else (low, low + 1.0)
