"""Lays a chart out: positions of lines, boxes, dots and texts. `svg.py` and `png.py` draw them.

Positions are in SVG units, from the upper left. Colours are names of the style sheet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from ...core.micro_batch_columns import Floats
from ...core.numbers import number_text
from .chart import Chart, Series, extent, numbered_points, ticks
from .formatting import tick_texts

WIDTH, HEIGHT = 350, 190  # of the drawing, with its labels
TOP, BOTTOM, RIGHT = 22, 36, 12  # margins around the plot; the left one depends on the labels
CHAR_WIDTH = 6.7  # width of a digit, about
MIN_ROW_HEIGHT, MAX_ROW_HEIGHT = 26, 46  # height of bars
MAX_FILLED_HISTOGRAMS = 3  # with more series, histograms are outlines only
MAX_PRINTED_NAME = 26 * CHAR_WIDTH
DASHES = ("", "6 3", "2 3")

Places = Sequence[tuple[float, float]]
Values = TypeVar("Values", float, Floats)


@dataclass(frozen=True, slots=True)
class Line:
    """Polylines or filled areas with the same style.

    Attributes:
        css: Style-sheet class of the strokes; empty: areas without strokes.
        parts: The points of each polyline or area.
        stroke: Stroke colour, if the class has none.
        fill: Fill colour; empty: none.
        opacity: Opacity of the fill.
        dash: SVG dash pattern; empty: none, or the pattern of the class.
        title: Text on hover.
    """

    css: str
    parts: Sequence[Places]
    stroke: str = ""
    fill: str = ""
    opacity: float = 1.0
    dash: str = ""
    title: str = ""


@dataclass(frozen=True, slots=True)
class Box:
    """A filled rectangle, positioned by its upper left corner; `hatch` is its hatch number in print."""

    x: float
    y: float
    width: float
    height: float
    colour: str
    title: str = ""
    css: str = ""
    hatch: int = 0


@dataclass(frozen=True, slots=True)
class Dots:
    """Points of a series. Points with a title, shown on hover, are larger."""

    places: Places
    colour: str
    title: str = ""


@dataclass(frozen=True, slots=True)
class Text:
    """A line of text whose start, middle or end is at `x`."""

    x: float
    y: float
    text: str
    anchor: str = "start"
    css: str = ""


Shape = Line | Box | Dots | Text


@dataclass(frozen=True, slots=True)
class LegendEntry:
    """An entry of a legend. In print, `hatch` is the hatch of a bar sample and `dash` the dash of a line sample."""

    label: str
    colour: str
    hatch: int = 0
    dash: str = ""


def shortened(name: str, width: float) -> str:
    """Shorten a name to `width` SVG units."""
    letters = int(width / CHAR_WIDTH)
    return name if len(name) <= letters else name[: max(1, letters - 1)] + "…"


def stairs(across: Floats, up: Floats) -> list[tuple[float, float]]:
    """Return the points of a step curve: each value of `up` lasts until the next of `across`, which may be longer."""
    return list(zip(np.repeat(across, 2)[1:].tolist(), np.repeat(up, 2).tolist(), strict=False))


class Layout:
    """The layout of one chart that has data. `height` is the height of the drawing.

    Args:
        chart: The chart to lay out.
        in_print: Use more dash patterns, for prints without colour, and allow longer row names in a smaller font.
    """

    def __init__(self, chart: Chart, *, in_print: bool = False) -> None:
        self.chart = chart
        self._lines_per_dash = 2 if in_print else 4
        rows = len(chart.categories)
        self.row = min(MAX_ROW_HEIGHT, max(MIN_ROW_HEIGHT, (HEIGHT - TOP - BOTTOM) / max(1, rows)))
        self.height = max(HEIGHT, TOP + BOTTOM + rows * self.row)
        (self.x0, self.x1), (self.y0, self.y1) = extent(chart)
        self.y_ticks = ticks(self.y0, self.y1, 4, whole=chart.y.whole)
        percent = chart.kind == "cdf"
        self.y_texts = [f"{round(100 * v)}%" for v in self.y_ticks] if percent else tick_texts(self.y_ticks)
        longest = max(map(len, chart.categories or self.y_texts), default=1)
        self.left = min(0.38 * WIDTH, 10 + CHAR_WIDTH * longest)
        self._name_width = MAX_PRINTED_NAME if in_print else self.left
        self.right = WIDTH - RIGHT
        self.bottom = self.height - BOTTOM

    @property
    def legend(self) -> list[LegendEntry]:
        """The entries of the chart's legend."""
        entries = []
        for number, series in enumerate(self.chart.series):
            if series.label:
                hatch, dash = number if self.chart.kind == "bars" else 0, self._dash(number)
                entries.append(LegendEntry(series.label, series.colour, hatch, dash))
        if len(entries) == 1 and self.chart.kind == "histogram":
            entries = []
        numbers = numbered_points(self.chart)
        if not numbers:  # the name next to a point is left out if it would overlap another
            entries += [LegendEntry(s.name, s.colour) for s in self.chart.series if s.name and s.shows_name]
        return entries + [LegendEntry(f"{number} {series.name}", series.colour) for number, series in numbers]

    def x(self, value: Values) -> Values:
        """Return the x position of a value, or of each value of an array."""
        return self.left + (value - self.x0) / (self.x1 - self.x0) * (self.right - self.left)

    def y(self, value: Values) -> Values:
        """Return the y position of a value, or of each value of an array."""
        return self.bottom - (value - self.y0) / (self.y1 - self.y0) * (self.bottom - TOP)

    def shapes(self) -> Iterator[Shape]:
        """Yield all shapes in drawing order: later shapes cover earlier ones."""
        yield from self._axes()
        yield from {
            "lines": self._lines,
            "steps": self._lines,
            "cdf": self._lines,
            "histogram": self._histogram,
            "areas": self._areas,
            "bars": self._bars,
            "scatter": self._scatter,
        }[self.chart.kind]()
        yield from self._marks()

    def _axes(self) -> Iterator[Shape]:
        bars, y_texts = self.chart.kind == "bars", zip(self.y_ticks, self.y_texts, strict=True)
        if not bars:
            yield Line("grid", [[(self.left, self.y(v)), (self.right, self.y(v))] for v in self.y_ticks])
            yield from (Text(self.left - 5, self.y(value) + 4, text, "end") for value, text in y_texts)
            yield Text(4, 11, self.chart.y.text, css="name")
        values = ticks(self.x0, self.x1, 5 if self.x1 < 1e4 else 3)
        if bars:
            yield Line("grid", [[(self.x(v), TOP - 6), (self.x(v), self.bottom)] for v in values])
        for value, text in zip(values, tick_texts(values), strict=True):
            anchor = "end" if self.x(value) > self.right - 14 else "middle"
            yield Text(self.x(value), self.bottom + 15, text, anchor)
        yield Line("axis", [[(self.left, self.bottom), (self.right, self.bottom)]])
        yield Text((self.left + self.right) / 2, self.height - 4, self.chart.x.text, "middle", "name")

    def _places(self, series: Series) -> list[tuple[float, float]]:
        return list(zip(self.x(series.x).tolist(), self.y(series.y).tolist(), strict=True))

    def _lines(self) -> Iterator[Shape]:
        is_cdf = self.chart.kind == "cdf"
        for number, series in enumerate(self.chart.series):
            if series.band is not None:
                low, high = series.band
                yield self._between(np.append(series.x, series.x[-1:]), low, high, series.colour, 0.22)
            inside = series.x <= self.x1
            if not inside.any():
                continue
            across, up = self.x(series.x[inside]), self.y(series.y[inside])
            is_straight = self.chart.kind == "lines"
            places = list(zip(across.tolist(), up.tolist(), strict=True)) if is_straight else stairs(across, up)
            if is_cdf:
                places = [(self.left, self.bottom), (places[0][0], self.bottom), *places]
            if is_cdf or not inside.all():
                places.append((self.right, places[-1][1]))
            yield Line("line", [places], series.colour, dash=self._dash(number), title=series.label)

    def _dash(self, number: int) -> str:
        return DASHES[number // self._lines_per_dash % len(DASHES)]

    def _between(self, edges: Floats, low: Floats, high: Floats, colour: str, opacity: float, title: str = "") -> Line:
        """Return the area between two step curves: along the top, and back along the bottom."""
        across = self.x(edges.clip(self.x0, self.x1))
        places = [*stairs(across, self.y(high)), *reversed(stairs(across, self.y(low)))]
        return Line("", [places], fill=colour, opacity=opacity, title=title)

    def _histogram(self) -> Iterator[Shape]:
        alone = len(self.chart.series) == 1
        for series in self.chart.series:
            if alone:
                for a, b, n in zip(series.x.tolist(), series.x[1:].tolist(), series.y.tolist(), strict=False):
                    if n:
                        title = f"{number_text(a)} to {number_text(b)} {self.chart.x.unit}: {n:,.0f}"
                        width, top = max(0.8, self.x(b) - self.x(a) - 0.8), self.y(n)
                        yield Box(self.x(a), top, width, self.bottom - top, series.colour, title)
                continue
            places = stairs(self.x(series.x), self.y(series.y))
            places = [(places[0][0], self.bottom), *places, (places[-1][0], self.bottom)]
            fill = series.colour if len(self.chart.series) <= MAX_FILLED_HISTOGRAMS else ""
            yield Line("line", [places], series.colour, fill, 0.18, title=series.label)

    def _areas(self) -> Iterator[Shape]:
        below = np.zeros(1)
        for series in self.chart.series:
            top = below + series.y
            yield self._between(series.x, np.broadcast_to(below, top.shape), top, series.colour, 1.0, series.label)
            below = top

    def _bars(self) -> Iterator[Shape]:
        for row, name in enumerate(self.chart.categories):
            yield Text(self.left - 6, TOP + (row + 0.5) * self.row - 3, shortened(name, self._name_width), "end", "row")
        at = np.zeros(len(self.chart.categories))
        for number, series in enumerate(self.chart.series):
            for row, (begin, value) in enumerate(zip(at.tolist(), series.y.tolist(), strict=True)):
                if value > 0:
                    left, right = self.x(begin), self.x(begin + value)
                    title = f"{series.label}: {number_text(value)} {self.chart.x.unit}"
                    y, width, height = TOP + row * self.row - 3, max(0.3, right - left), self.row - 8
                    yield Box(left, y, width, height, series.colour, title, css="part", hatch=number)
            at = at + series.y

    def _scatter(self) -> Iterator[Shape]:
        if self.chart.line:
            yield Line("mark", [[(self.x(x), self.y(y)) for x, y in self.chart.line]])
        for series in reversed(self.chart.series):
            title = ""
            if series.name:
                x, y = (number_text(float(values[0])) for values in (series.x, series.y))
                title = f"{series.name}: {x} {self.chart.x.unit}, {y} {self.chart.y.unit}"
            yield Dots(self._places(series), series.colour, title)
        yield from self._names()

    def _names(self) -> Iterator[Text]:
        """Yield names, or their numbers, next to points. One that would overlap another is left out."""
        taken: list[tuple[float, float, float, float]] = []
        numbers = {id(series): str(number) for number, series in numbered_points(self.chart)}
        for series in self.chart.series:
            taken += [(x - 4, y - 4, x + 4, y + 4) for x, y in self._places(series)]
        for series in self.chart.series:
            if not (series.name and series.shows_name):
                continue
            ((x, y),), name = self._places(series), numbers.get(id(series), series.name)
            length = CHAR_WIDTH * 0.95 * len(name)
            left = x - 7 - length if x + 7 + length > self.right else x + 7
            box = left, y - 7, left + length, y + 7
            if all(box[2] < t[0] or box[0] > t[2] or box[3] < t[1] or box[1] > t[3] for t in taken):
                taken.append(box)
                yield Text(left, y + 4, name)

    def _marks(self) -> Iterator[Shape]:
        last = -1e9
        for number, (name, value) in enumerate(self.chart.marks):
            x, text = self.x(value), f"{name} {number_text(value)} {self.chart.x.unit}".rstrip()
            if value > self.x1:
                yield Text(self.right, TOP - 7 + 14 * number, f"{text} \N{RIGHTWARDS ARROW}", "end")
            elif value < self.x0:  # below the plot: the name of the y axis is above it
                yield Text(self.left, self.bottom - 5 + 14 * number, f"\N{LEFTWARDS ARROW} {text}")
            else:
                yield Line("mark", [[(x, TOP - 4), (x, self.bottom)]])
                if x - last > CHAR_WIDTH * 4:
                    yield Text(x, TOP - 7, name, "end" if x > self.right - 10 else "middle")
                    last = x
