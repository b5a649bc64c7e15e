"""A chart as data. `layout.py` lays it out; `svg.py` renders it for a page, `png.py` for a paper or a notebook.

The kind of a chart determines how its series are read:

- `lines`: straight lines through the points (x, y).
- `steps`: y holds until the next x.
- `cdf`: x ascends; y is the share of values up to x.
- `histogram`: y are counts; x are the edges of the bins, one more than counts.
- `areas`: stacked; y are heights; x are the edges between them, one more than heights.
- `bars`: stacked and horizontal; y has one value per category of the chart.
- `scatter`: points (x, y).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ...core.micro_batch_columns import Floats

Kind = Literal["lines", "steps", "cdf", "histogram", "areas", "bars", "scatter"]
_MAX_NAMES, _MAX_NAME_LETTERS = 5, 14  # most point names written in a scatter plot, and the longest one
_MAX_GROWTH = 2.0  # most growth of an axis to include a mark, as a multiple of the data range
_NUM_COLOURS = 8  # the style sheet's series colours, `s0` to `s7`


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of a chart.

    Attributes:
        label: What the axis shows.
        unit: Unit of its values; empty if they have none.
        low: Lower end; None: set by the data.
        high: Upper end; None: set by the data.
        whole: Ticks are whole numbers only.
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
        label: Its name in the legend; empty: no legend entry.
        x, y: Its values, read according to the chart's kind.
        colour: Name of a colour in the style sheet.
        name: Name of a scatter point, if the series has only one.
        band: Lowest and highest values around each y, if y are means.
        shows_name: The name is written next to the point. If not, the page shows it on hover.
        number: Number drawn in place of the name if there are too many names or they are too long.
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
        marks: Vertical lines, each a name and an x value. The x axis grows to include them; one that is too far off is
            an arrow at the end of the axis, with its true value.
        categories: Names of the bars.
        line: Points (x, y) of a line drawn behind the scatter points.
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
    note: str = ""

    @property
    def is_empty(self) -> bool:
        """Whether there is no value to draw."""
        return not any(np.isfinite(series.y).any() for series in self.series if len(series.y))


def stacked_bars(
    name: str, title: str, x: Axis, rows: Sequence[tuple[str, Mapping[str, float]]], colours: Mapping[str, str]
) -> Chart:
    """Build a stacked bar chart.

    Args:
        name: File name of the figure.
        title: Heading of the figure.
        x: The axis of the bars' lengths.
        rows: The label of each bar and the length of each of its parts by name.
        colours: The colour of each part by name, in drawing order. Parts absent from all bars are left out.
    """
    series = tuple(
        Series(part, np.zeros(len(rows)), np.array([row.get(part, 0.0) for _, row in rows]), colour)
        for part, colour in colours.items()
        if any(row.get(part, 0.0) > 0 for _, row in rows)
    )
    return Chart(name, title, "bars", x, Axis(""), series, categories=tuple(label for label, _ in rows))


def numbered_points(chart: Chart) -> list[tuple[int, Series]]:
    """Return the points of a scatter plot that are drawn with a number in place of their name, each with its number.

    A series' own number is the same in all charts of a page. Series without one are numbered from left to right. The
    legend maps numbers to names. Numbers are used if there are too many names, or names too long, to write next to the
    points. Otherwise the list is empty.
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
    """Return the x range and the y range (low, high) of a chart that has data, with some margin around the data.

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
    if chart.kind == "scatter":  # keep every point inside the axes, so that none is drawn at a wrong position
        x = min(x[0], float(places.min())), max(x[1], float(places.max()))
        y = min(y[0], float(values.min())), max(y[1], float(values.max()))
    return x, y


def _marks_near(chart: Chart, values: Floats) -> list[float]:
    """Return the marks that the x axis grows to include: at most `_MAX_GROWTH` times the data range away from it."""
    lowest, highest = float(values.min()), float(values.max())
    lowest = lowest if chart.x.low is None else min(lowest, chart.x.low)
    reach = _MAX_GROWTH * (highest - lowest)
    return [value for _, value in chart.marks if lowest - reach <= value <= highest + reach]


def _ends(axis: Axis, values: Floats, room: float) -> tuple[float, float]:
    """Return the ends of an axis; `room` is the margin, as a share of the data range, at ends set by the data."""
    lowest, highest = float(values.min()), float(values.max())
    margin = room * (highest - min(lowest, axis.low if axis.low is not None else lowest))
    low = axis.low if axis.low is not None else lowest - margin
    high = axis.high if axis.high is not None else highest + margin
    return (low, high) if high > low else (low, low + 1.0)
