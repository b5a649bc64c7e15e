"""Draws charts as figures of a page: a legend and SVG, with the colours of the style sheet."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from ..core.micro_batch_columns import Floats
from .chart import Chart, Series, extent, numbered_points, placed_marks, ticks
from .formatting import number_text, tick_texts

WIDTH, HEIGHT = 350, 190  # of the drawing, with its labels, in SVG units
TOP, BOTTOM, RIGHT = 22, 36, 12  # margins around the plot; the left one depends on the labels
CHAR_WIDTH = 6.7  # of a digit, about
MIN_ROW_HEIGHT, MAX_ROW_HEIGHT = 26, 46  # of bars and of rows of a heat map
MAX_FILLED_HISTOGRAMS = 3  # with more series, histograms are outlines only
DASHES = ("", "6 3", "2 3")
LINES_PER_DASH = 4  # lines that have the same dash


def figure(chart: Chart) -> str:
    """Render a chart as a `figure` element: well-formed XML that refers to nothing outside, with titles on hover."""
    heading = f"<figcaption>{html.escape(chart.title)}</figcaption>"
    if chart.is_empty:
        return f'<figure>{heading}<ul class="key"></ul><p class="none">nothing measured</p></figure>'
    plot = _Plot(chart)
    note = f'<p class="note">{html.escape(chart.note)}</p>'  # even if empty: figures side by side align part by part
    label = html.escape(f"{chart.title}: {chart.y.text} over {chart.x.text}", quote=True)
    return (
        f"<figure>{heading}{_legend(chart)}"
        f'<svg class="chart" viewBox="0 0 {WIDTH} {plot.height}" role="img" aria-label="{label}">'
        f"{plot.draw()}</svg>"
        f"{note}</figure>"
    )


def _legend(chart: Chart) -> str:
    named = [series for series in chart.series if series.label]
    if chart.kind == "heat" or not named or (len(named) == 1 and chart.kind == "histogram"):
        named = []
    labels = [(series, series.label) for series in named]
    if chart.kind == "scatter" and not numbered_points(chart):  # a name beside its point may have no room
        labels += [(s, s.names[0]) for s in chart.series if len(s.names) == 1 and s.shows_names]
    labels += [(series, f"{number} {series.names[0]}") for number, series in numbered_points(chart)]
    items = "".join(
        f'<li><i class="swatch" style="background:var(--{series.colour})"></i>{html.escape(label)}</li>'
        for series, label in labels
    )
    return f'<ul class="key">{items}</ul>'


def _n(value: float) -> str:
    """Write a coordinate with one decimal, or none if it is whole."""
    text = f"{value:.1f}"
    return text[:-2] if text.endswith(".0") else text


class _Plot:
    """The inside of the SVG of one chart."""

    def __init__(self, chart: Chart) -> None:
        self.chart = chart
        has_rows = chart.kind in ("bars", "heat")
        rows = len(chart.categories) if chart.kind == "bars" else len(chart.series)
        self.row = min(MAX_ROW_HEIGHT, max(MIN_ROW_HEIGHT, (HEIGHT - TOP - BOTTOM) / max(1, rows)))
        self.height = max(HEIGHT, TOP + BOTTOM + rows * self.row) if has_rows else HEIGHT
        (self.x0, self.x1), (self.y0, self.y1) = extent(chart)
        self.y_ticks = ticks(self.y0, self.y1, 4, whole=chart.y.whole)
        percent = chart.kind == "cdf"
        self.y_texts = [f"{round(100 * v)}%" for v in self.y_ticks] if percent else tick_texts(self.y_ticks)
        names = chart.categories if chart.kind == "bars" else [s.label for s in chart.series]
        longest = max((len(text) for text in (names if has_rows else self.y_texts)), default=1)
        self.left = min(0.38 * WIDTH, 10 + CHAR_WIDTH * longest)
        self.right = WIDTH - RIGHT
        self.bottom = self.height - BOTTOM

    def x(self, value: float) -> float:
        """Return the SVG coordinate of a value on the x axis."""
        return self.left + (value - self.x0) / (self.x1 - self.x0) * (self.right - self.left)

    def y(self, value: float) -> float:
        """Return the SVG coordinate of a value on the y axis."""
        return self.bottom - (value - self.y0) / (self.y1 - self.y0) * (self.bottom - TOP)

    def draw(self) -> str:
        """Render what stands inside the `svg` element."""
        kind = self.chart.kind
        body = {
            "lines": self._lines, "steps": self._lines, "cdf": self._lines, "histogram": self._histogram,
            "areas": self._areas, "bars": self._bars, "scatter": self._scatter, "heat": self._heat,
        }[kind]()  # fmt: skip
        parts = [*([] if kind == "heat" else self._axes()), *body, *self._marks()]
        return "".join(parts)

    def _text(self, x: float, y: float, text: str, anchor: str = "start", css: str = "") -> str:
        css = f' class="{css}"' if css else ""
        return f'<text x="{_n(x)}" y="{_n(y)}" text-anchor="{anchor}"{css}>{html.escape(text)}</text>'

    def _axes(self) -> Iterator[str]:
        bars = self.chart.kind == "bars"
        if not bars:
            grid = "".join(f"M{_n(self.left)},{_n(self.y(v))}H{_n(self.right)}" for v in self.y_ticks)
            yield f'<path class="grid" d="{grid}"/>'
            for value, text in zip(self.y_ticks, self.y_texts, strict=True):
                yield self._text(self.left - 5, self.y(value) + 4, text, "end")
            yield self._text(4, 11, self.chart.y.text, css="name")
        count = 5 if self.x1 < 1e4 else 3
        values = ticks(self.x0, self.x1, count)
        if bars:
            grid = "".join(f"M{_n(self.x(v))},{TOP - 6}V{_n(self.bottom)}" for v in values)
            yield f'<path class="grid" d="{grid}"/>'
        for value, text in zip(values, tick_texts(values), strict=True):
            anchor = "end" if self.x(value) > self.right - 14 else "middle"
            yield self._text(self.x(value), self.bottom + 15, text, anchor)
        yield f'<path class="axis" d="M{_n(self.left)},{_n(self.bottom)}H{_n(self.right)}"/>'
        middle = (self.left + self.right) / 2
        yield self._text(middle, self.height - 4, self.chart.x.text, "middle", "name")

    def _clip(self, x: Floats) -> Floats:
        return np.clip(x, self.x0, self.x1)

    def _points(self, series: Series) -> Iterable[tuple[float, float]]:
        return zip(series.x.tolist(), series.y.tolist(), strict=True)

    def _lines(self) -> Iterator[str]:
        for number, series in enumerate(self.chart.series):
            if not len(series.x):
                continue
            yield from self._band(series)
            path: list[str] = []
            inside = series.x <= self.x1
            for x, y in zip(series.x[inside].tolist(), series.y[inside].tolist(), strict=True):
                across, up = _n(self.x(x)), _n(self.y(y))
                if not path:
                    start = f"M{_n(self.left)},{_n(self.bottom)}H{across}V{up}" if self.chart.kind == "cdf" else ""
                    path.append(start or f"M{across},{up}")
                else:
                    path.append(f"L{across},{up}" if self.chart.kind == "lines" else f"H{across}V{up}")
            if path and (self.chart.kind == "cdf" or not inside.all()):
                path.append(f"H{_n(self.right)}")
            pattern = DASHES[number // LINES_PER_DASH % len(DASHES)]
            dash = f' stroke-dasharray="{pattern}"' if number >= LINES_PER_DASH else ""
            title = f"<title>{html.escape(series.label)}</title>"
            yield f'<path class="line" style="stroke:var(--{series.colour})"{dash} d="{"".join(path)}">{title}</path>'

    def _band(self, series: Series) -> Iterator[str]:
        """Draw the area between the lowest and the highest values: along the top, and back along the bottom."""
        if series.band is not None:
            low, high = series.band
            ends = np.append(series.x[1:], series.x[-1]).tolist()
            there = zip(series.x.tolist(), ends, high.tolist(), strict=True)
            back = zip(reversed(series.x.tolist()), reversed(ends), reversed(low.tolist()), strict=True)
            path = "".join(f"{'L' if n else 'M'}{_n(self.x(a))},{_n(self.y(v))}H{_n(self.x(b))}" for n, (a, b, v) in
                           enumerate(there))  # fmt: skip
            path += "".join(f"L{_n(self.x(b))},{_n(self.y(v))}H{_n(self.x(a))}" for a, b, v in back)
            yield f'<path style="fill:var(--{series.colour});fill-opacity:.22" d="{path}Z"/>'

    def _histogram(self) -> Iterator[str]:
        alone = len(self.chart.series) == 1
        for series in self.chart.series:
            edges, counts = series.x.tolist(), series.y.tolist()
            if alone:
                for a, b, n in zip(edges, edges[1:], counts, strict=False):
                    if n:
                        w = max(0.8, self.x(b) - self.x(a) - 0.8)
                        title = f"{number_text(a)} to {number_text(b)} {self.chart.x.unit}: {n:,.0f}"
                        yield (
                            f'<rect x="{_n(self.x(a))}" y="{_n(self.y(n))}" width="{_n(w)}" '
                            f'height="{_n(self.bottom - self.y(n))}" style="fill:var(--{series.colour})">'
                            f"<title>{title}</title></rect>"
                        )
                continue
            path = [f"M{_n(self.x(edges[0]))},{_n(self.bottom)}"]
            path += [f"V{_n(self.y(n))}H{_n(self.x(b))}" for b, n in zip(edges[1:], counts, strict=True)]
            outline = "".join([*path, f"V{_n(self.bottom)}"])
            fill = (
                f";fill:var(--{series.colour});fill-opacity:.18"
                if len(self.chart.series) <= MAX_FILLED_HISTOGRAMS
                else ""
            )
            title = f"<title>{html.escape(series.label)}</title>"
            yield f'<path class="line" style="stroke:var(--{series.colour}){fill}" d="{outline}">{title}</path>'

    def _areas(self) -> Iterator[str]:
        below: Floats | None = None
        for series in self.chart.series:
            base = np.zeros(len(series.y)) if below is None else below
            top = base + series.y
            edges = [self.x(v) for v in self._clip(series.x).tolist()]
            path = [f"M{_n(edges[0])},{_n(self.y(float(base[0])) if len(base) else self.bottom)}"]
            path += [f"V{_n(self.y(t))}H{_n(b)}" for b, t in zip(edges[1:], top.tolist(), strict=True)]
            backward = zip(reversed(edges[:-1]), reversed(base.tolist()), strict=True)
            path += [f"V{_n(self.y(t))}H{_n(a)}" for a, t in backward]
            title = f"<title>{html.escape(series.label)}</title>"
            yield f'<path style="fill:var(--{series.colour})" d="{"".join(path)}Z">{title}</path>'
            below = top

    def _bars(self) -> Iterator[str]:
        at = np.zeros(len(self.chart.categories))
        for row, name in enumerate(self.chart.categories):
            yield self._text(self.left - 6, TOP + (row + 0.5) * self.row - 3, _shortened(name, self.left), "end", "row")
        for series in self.chart.series:
            for row, value in enumerate(series.y.tolist()):
                if value > 0:
                    a, b = self.x(float(at[row])), self.x(float(at[row]) + value)
                    title = f"{series.label}: {number_text(value)} {self.chart.x.unit}"
                    yield (
                        f'<rect x="{_n(a)}" y="{_n(TOP + row * self.row - 3)}" width="{_n(max(0.3, b - a))}" '
                        f'height="{_n(self.row - 8)}" class="part" style="fill:var(--{series.colour})">'
                        f"<title>{html.escape(title)}</title></rect>"
                    )
            at = at + series.y

    def _scatter(self) -> Iterator[str]:
        if self.chart.diagonal:
            low, high = max(self.x0, self.y0), min(self.x1, self.y1)
            yield (
                f'<path class="mark" d="M{_n(self.x(low))},{_n(self.y(low))}L{_n(self.x(high))},{_n(self.y(high))}"/>'
            )
        if self.chart.line:
            path = "L".join(f"{_n(self.x(x))},{_n(self.y(y))}" for x, y in self.chart.line)
            yield f'<path class="mark" d="M{path}"/>'
        for series in reversed(self.chart.series):
            points = list(self._points(series))
            if series.names:
                for (x, y), name in zip(points, series.names, strict=True):
                    yield (
                        f'<circle cx="{_n(self.x(x))}" cy="{_n(self.y(y))}" r="4" style="fill:var(--{series.colour})">'
                        f"<title>{html.escape(name)}: {number_text(x)} {self.chart.x.unit}, {number_text(y)} "
                        f"{self.chart.y.unit}</title></circle>"
                    )
                continue
            dots = "".join(f"M{_n(self.x(x))},{_n(self.y(y))}h0" for x, y in points)
            yield f'<path class="dots" style="stroke:var(--{series.colour})" d="{dots}"/>'
        yield from self._names()

    def _names(self) -> Iterator[str]:
        """Write names, or numbers in their place, beside points. One that would overlap another is left out."""
        taken: list[tuple[float, float, float, float]] = []
        numbers = {id(series): number for number, series in numbered_points(self.chart)}
        for series in self.chart.series:
            taken += [(self.x(x) - 4, self.y(y) - 4, self.x(x) + 4, self.y(y) + 4) for x, y in self._points(series)]
        for series in self.chart.series:
            names = series.names if series.shows_names else ()
            if id(series) in numbers:
                names = (str(numbers[id(series)]),)
            for (x, y), name in zip(self._points(series), names, strict=False):
                across, up, length = self.x(x), self.y(y), CHAR_WIDTH * 0.95 * len(name)
                left = across - 7 - length if across + 7 + length > self.right else across + 7
                box = left, up - 7, left + length, up + 7
                if all(box[2] < t[0] or box[0] > t[2] or box[3] < t[1] or box[1] > t[3] for t in taken):
                    taken.append(box)
                    yield self._text(left, up + 4, name)

    def _heat(self) -> Iterator[str]:
        columns = self.chart.categories
        values = np.array([series.y for series in self.chart.series])
        low, high = self.chart.shades or (float(np.nanmin(values)), float(np.nanmax(values)))
        width = (self.right - self.left) / max(1, len(columns))
        yield self._text(4, 11, self.chart.y.text, css="name")
        yield self._text((self.left + self.right) / 2, self.height - 4, self.chart.x.text, "middle", "name")
        bottom = TOP + len(self.chart.series) * self.row
        for column, name in enumerate(columns):
            x = self.left + (column + 0.5) * width
            yield self._text(x, bottom + 14, _shortened(name, width), "middle")
        for row, series in enumerate(self.chart.series):
            y = TOP + row * self.row
            yield self._text(self.left - 6, y + self.row / 2 + 4, _shortened(series.label, self.left), "end")
            for column, value in enumerate(series.y.tolist()):
                if not np.isfinite(value):
                    continue
                share = (value - low) / (high - low) if high > low else 1.0
                x = self.left + column * width
                strength = round(12 + 76 * share)
                ink = "on-chunk" if share > 0.55 else "ink"
                yield (
                    f'<rect x="{_n(x + 0.5)}" y="{_n(y + 0.5)}" width="{_n(width - 1)}" height="{_n(self.row - 1)}" '
                    f'style="fill:color-mix(in srgb,var(--chunk) {strength}%,var(--panel))"/>'
                    f'<text x="{_n(x + width / 2)}" y="{_n(y + self.row / 2 + 4)}" text-anchor="middle" '
                    f'style="fill:var(--{ink})">{number_text(value)}</text>'
                )

    def _marks(self) -> Iterator[str]:
        last = -1e9
        for number, mark in enumerate(placed_marks(self.chart)):
            x = self.x(mark.place)
            if mark.beyond:  # above the plot on the right; on the left the name of the axis is there
                y, anchor = (TOP - 7, "end") if mark.beyond > 0 else (self.bottom - 5, "start")
                yield self._text(x, y + 14 * number, mark.text, anchor)
                continue
            yield f'<path class="mark" d="M{_n(x)},{TOP - 4}V{_n(self.bottom)}"/>'
            if x - last > CHAR_WIDTH * 4:
                yield self._text(x, TOP - 7, mark.text, "end" if x > self.right - 10 else "middle")
                last = x


def _shortened(name: str, width: float) -> str:
    """Shorten a name to `width` SVG units."""
    letters = int(width / CHAR_WIDTH)
    return name if len(name) <= letters else name[: max(1, letters - 1)] + "…"


def figures(charts: Sequence[Chart]) -> str:
    """Render charts side by side, as many as the page has room for."""
    return f'<div class="figures">{"".join(figure(chart) for chart in charts)}</div>'
