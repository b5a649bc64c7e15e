"""Draws charts as PNG figures for a paper: one column wide, 200 dpi. matplotlib is imported only when drawing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.whole_file import whole_file
from .chart import Chart
from .layout import CHAR_WIDTH, WIDTH, Box, Dots, Layout, Line, Shape, Text, shortened
from .page_parts import template

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMN, DPI = 3.4, 200  # inches: a column of a two-column paper
FONT = 7.5  # points
TEXT, TITLE, LEGEND_ROW, SWATCH, MARGIN = 12.0, 17.0, 15.0, 9.0, 4.0  # SVG units; text is as on a page
FITS = 0.96  # share of the room that text may take: rasterization widens small letters
_POINTS = COLUMN * 72 / WIDTH  # points per SVG unit
HATCHES = ("", "////", "\\\\\\\\", "xxxx", "....", "----", "++++", "||||", "oooo", "****")
# Style-sheet settings of the line classes: colour, width in SVG units, dashes.
_LINES = {"grid": ("line", 1.0, ""), "axis": ("strong", 1.0, ""), "mark": ("ink", 1.0, "3 3"), "line": ("", 1.8, "")}


def write_figures(path: Path, charts: Sequence[Chart], *, simulated: bool = False) -> list[Path]:
    """Write a PNG of each non-empty chart into the folder `path`, created if needed; return their paths.

    If `simulated`, titles say so.
    """
    charts = [chart for chart in charts if not chart.is_empty]
    if simulated:
        charts = [replace(chart, title=f"{chart.title}, simulated") for chart in charts]
    if not charts:
        return []
    from matplotlib.figure import Figure

    path.mkdir(parents=True, exist_ok=True)
    written = []
    for chart in charts:
        figure = Figure(dpi=DPI)
        draw_chart(chart, figure)
        file = path / f"{chart.name}.png"
        with whole_file(file) as part:
            figure.savefig(part, format="png", dpi=DPI, metadata={"Software": None, "Title": chart.title})
        written.append(file)
    return written


def draw_chart(chart: Chart, figure: Figure) -> None:
    """Draw a chart that has data into an empty figure, and set the figure to the chart's size."""
    from matplotlib import rc_context

    layout = Layout(chart, in_print=True)
    head = list(_head(layout))
    above = max(shape.y for shape in head if isinstance(shape, Text)) + 6
    whole = above + layout.height
    figure.set_size_inches(COLUMN, COLUMN * whole / WIDTH)
    with rc_context(paper_style()):
        for shapes, bottom, height in ((head, layout.height, above), (layout.shapes(), 0.0, layout.height)):
            axes = figure.add_axes((0.0, bottom / whole, 1.0, height / whole), xlim=(0, WIDTH), ylim=(height, 0))
            axes.set_axis_off()
            _draw(axes, shapes)


def _head(layout: Layout) -> Iterator[Shape]:
    """Yield the title and the legend, wrapped into as many rows as needed."""
    yield Text(MARGIN, TEXT, layout.chart.title, css="title")
    x, y, right = MARGIN, TEXT + TITLE, WIDTH - MARGIN
    for entry in layout.legend:
        label = shortened(entry.label, right - MARGIN - LEGEND_ROW)
        width = LEGEND_ROW + CHAR_WIDTH * len(label)
        if x + width > right and x > MARGIN:
            x, y = MARGIN, y + LEGEND_ROW
        if layout.chart.kind in ("lines", "steps", "cdf"):
            yield Line("line", [[(x, y - 4), (x + LEGEND_ROW - 4, y - 4)]], entry.colour, dash=entry.dash)
        else:
            yield Box(x, y - SWATCH, SWATCH, SWATCH, entry.colour, hatch=entry.hatch)
        yield Text(x + LEGEND_ROW, y, label)
        x += width + 3 * MARGIN


def _draw(axes: Axes, shapes: Iterable[Shape]) -> None:
    """Draw shapes into axes whose data units are SVG units. Text too long for the axes is shrunk."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.patches import Polygon, Rectangle
    from matplotlib.textpath import text_to_path

    palette = light_palette()
    for order, shape in enumerate(shapes):
        match shape:
            case Text(x, y, text, anchor, css):
                across = {"start": "left", "middle": "center", "end": "right"}[anchor]
                ink = palette["ink" if css else "soft"]
                font = FontProperties(size=TEXT, weight="bold" if css == "title" else "normal")
                width = text_to_path.get_text_width_height_descent(text, font, False)[0]
                room = {"start": FITS * (WIDTH - x), "middle": width, "end": FITS * x}[anchor]
                font.set_size(TEXT * _POINTS * min(1.0, room / max(width, 1.0)))
                axes.text(x, y, text, ha=across, fontproperties=font, color=ink, zorder=order)
            case Box():
                colour = palette[shape.colour]
                box = Rectangle((shape.x, shape.y), shape.width, shape.height, facecolor=colour, zorder=order)
                box.set(hatch=HATCHES[shape.hatch % len(HATCHES)], edgecolor="white", linewidth=0)
                axes.add_patch(box)
            case Line(css, parts, stroke, fill, opacity, dash):
                for places in parts:
                    if fill:
                        area = Polygon(places, facecolor=palette[fill], alpha=opacity, linewidth=0, zorder=order)
                        axes.add_patch(area)
                    if css:
                        colour, width, dashes = _LINES[css]
                        lengths = tuple(float(length) / width for length in (dash or dashes).split())
                        (line,) = axes.plot(*zip(*places, strict=True), color=palette[stroke or colour], zorder=order)
                        line.set(linewidth=width * _POINTS, linestyle=(0, lengths or None))
            case Dots(places, colour, title):
                size, opacity = (8.0, 1.0) if title else (3.0, 0.6)
                points = axes.scatter([], [], s=(size * _POINTS) ** 2, color=palette[colour], zorder=order)
                points.set(offsets=places, alpha=opacity, linewidth=0)


def paper_style() -> Any:
    """Return the matplotlib settings of all figures."""
    return {
        "font.size": FONT,
        "axes.titlesize": FONT + 0.5,
        "legend.fontsize": FONT - 0.8,
        "xtick.labelsize": FONT - 0.5,
        "ytick.labelsize": FONT - 0.5,
        "axes.linewidth": 0.6,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "hatch.linewidth": 0.4,
        "xtick.major.width": 0.6,
        "ytick.major.width": 0.6,
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],
        "legend.frameon": False,
    }


def light_palette() -> dict[str, str]:
    """Return the style sheet's light colours, as hex values by name, so that figures have the colours of the pages."""
    light = template("page.css").split("}", 1)[0]
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", light))
