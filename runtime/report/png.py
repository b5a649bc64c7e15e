"""Draws charts as PNG figures for a paper: one column wide, 200 dpi. Only drawing imports matplotlib."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .chart import Chart, extent, numbered_points, placed_marks
from .formatting import number_text
from .page_parts import template

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT, DPI = 3.4, 2.25, 200  # inches: a column of a two-column paper
FONT = 7.5
MAX_LEGEND_INSIDE = 3  # entries of a legend inside the plot; a longer one goes below it
MAX_NAME_LETTERS = 26  # of a row's name
HATCHES = ("", "////", "\\\\\\\\", "xxxx", "....", "----", "++++", "||||", "oooo", "****")
DASHES = ("-", "--", "-.", ":")


def write_figures(path: Path, charts: Sequence[Chart], *, simulated: bool = False) -> list[Path]:
    """Write a PNG of each chart that has data into the folder `path`, which is made if needed; return their paths.

    Titles say so if the charts are `simulated`.
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
        figure = Figure(dpi=DPI, layout="constrained")
        draw_chart(chart, figure)
        file = path / f"{chart.name}.png"
        figure.savefig(file, dpi=DPI, metadata={"Software": None, "Title": chart.title})
        written.append(file)
    return written


def draw_chart(chart: Chart, figure: Figure) -> None:
    """Draw a chart that has data into an empty figure, and give the figure the chart's size."""
    from matplotlib import rc_context

    rows = len(chart.categories) if chart.kind == "bars" else len(chart.series) if chart.kind == "heat" else 0
    height = max(HEIGHT, 1.0 + 0.26 * rows) + 0.13 * len(numbered_points(chart))
    figure.set_size_inches(WIDTH, height)
    with rc_context(paper_style()):
        axes = figure.add_subplot()
        _DRAW[chart.kind](axes, chart, light_palette())
        _finish(axes, chart)


def paper_style() -> Any:
    """Return the matplotlib settings of all figures."""
    return {
        "font.size": FONT, "axes.titlesize": FONT + 0.5, "axes.labelsize": FONT, "legend.fontsize": FONT - 0.8,
        "xtick.labelsize": FONT - 0.5, "ytick.labelsize": FONT - 0.5, "axes.linewidth": 0.6, "lines.linewidth": 1.2,
        "axes.spines.top": False, "axes.spines.right": False, "hatch.linewidth": 0.4, "xtick.major.width": 0.6,
        "ytick.major.width": 0.6, "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"],
        "legend.frameon": False, "axes.axisbelow": True,
    }  # fmt: skip


def light_palette() -> dict[str, str]:
    """Return the style sheet's light colours, as hex values by name, so that figures have the colours of the pages."""
    light = template("report.css").split("}", 1)[0]
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", light))


def _finish(axes: Axes, chart: Chart) -> None:
    """Add the title, the labels, the ends of the axes, the grid, the marks and the legend."""
    axes.set_title(chart.title, loc="left", fontweight="bold")
    axes.set_xlabel(chart.x.text)
    axes.set_ylabel(chart.y.text)
    if chart.kind == "heat":
        return
    (x0, x1), (y0, y1) = extent(chart)
    axes.set_xlim(x0, x1)
    if chart.kind == "bars":
        axes.grid(axis="x", linewidth=0.4, alpha=0.4)
    else:
        axes.set_ylim(y0, 1.02 * y1 if chart.kind == "cdf" else y1)  # a line at 100% needs room for its width
        axes.grid(linewidth=0.4, alpha=0.4)
    if chart.y.whole:
        axes.locator_params(axis="y", integer=True)
    for number, mark in enumerate(placed_marks(chart)):
        if mark.beyond:
            axes.annotate(mark.text, (mark.place, 0.0), xycoords=("data", "axes fraction"), fontsize=FONT - 1.5,
                          ha="right" if mark.beyond > 0 else "left", va="bottom", xytext=(0, 2 + FONT * number),
                          textcoords="offset points")  # fmt: skip
            continue
        axes.axvline(mark.place, color="black", linewidth=0.6, linestyle=(0, (3, 2)))
        axes.annotate(mark.text, (mark.place, 1.0), xycoords=("data", "axes fraction"), fontsize=FONT - 1.5, ha="right",
                      va="top", rotation=90, xytext=(-1, -1), textcoords="offset points")  # fmt: skip
    labels = [series.label for series in chart.series if series.label]
    if len(labels) > (1 if chart.kind == "histogram" else 0) and not all(s.names for s in chart.series):
        is_long = len(labels) > MAX_LEGEND_INSIDE or max(map(len, labels)) > 22
        columns = 1 if max(map(len, labels)) > 26 else 2 if max(map(len, labels)) > 16 else 3
        if is_long or chart.kind in ("bars", "areas"):
            axes.figure.legend(loc="outside lower center", ncols=columns, handlelength=1.6, columnspacing=1.0)
        else:
            axes.legend(loc="best", handlelength=1.8)


def _lines(axes: Axes, chart: Chart, palette: dict[str, str]) -> None:
    if chart.kind == "cdf":
        axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f}%")
    for number, series in enumerate(chart.series):
        style = DASHES[number // 2 % len(DASHES)] if len(chart.series) > 1 else "-"
        label = series.label or "_"
        colour = palette[series.colour]
        if chart.kind == "lines":
            axes.plot(series.x, series.y, color=colour, linestyle=style, label=label)
        else:
            x, y = series.x, series.y
            if series.band is not None:
                axes.fill_between(x, *series.band, step="post", color=colour, alpha=0.22, linewidth=0)
            if chart.kind == "cdf" and len(x):
                x, y = np.concatenate([[x[0]], x]), np.concatenate([[0.0], y])
            axes.step(x, y, where="post", color=colour, linestyle=style, label=label)


def _histogram(axes: Axes, chart: Chart, palette: dict[str, str]) -> None:
    for series in chart.series:
        colour = palette[series.colour]
        axes.stairs(series.y, series.x, fill=True, color=colour, alpha=0.85 if len(chart.series) == 1 else 0.2)
        if len(chart.series) > 1:
            axes.stairs(series.y, series.x, color=colour, label=series.label)


def _areas(axes: Axes, chart: Chart, palette: dict[str, str]) -> None:
    below = np.zeros(max((len(series.y) for series in chart.series), default=0))
    for series in chart.series:
        axes.stairs(below + series.y, series.x, baseline=below, fill=True, color=palette[series.colour],
                    label=series.label)  # fmt: skip
        below = below + series.y


def _bars(axes: Axes, chart: Chart, palette: dict[str, str]) -> None:
    places = np.arange(len(chart.categories))
    left = np.zeros(len(places))
    for number, series in enumerate(chart.series):
        axes.barh(places, series.y, left=left, height=0.66, color=palette[series.colour], label=series.label,
                  hatch=HATCHES[number % len(HATCHES)], edgecolor="white", linewidth=0)  # fmt: skip
        left = left + series.y
    axes.set_yticks(places, [_shortened(name) for name in chart.categories])
    axes.invert_yaxis()


def _shortened(name: str) -> str:
    return name if len(name) <= MAX_NAME_LETTERS else name[: MAX_NAME_LETTERS - 1] + "…"


def _scatter(axes: Axes, chart: Chart, palette: dict[str, str]) -> None:
    if chart.diagonal:
        (x0, x1), _ = extent(chart)
        axes.plot([x0, x1], [x0, x1], color="black", linewidth=0.6, linestyle=(0, (3, 2)))
    if chart.line:
        axes.plot(*zip(*chart.line, strict=True), color="black", linewidth=0.6, linestyle=(0, (3, 2)))
    with_numbers = numbered_points(chart)
    numbers = {id(series): number for number, series in with_numbers}
    for series in reversed(chart.series):
        size = 14 if series.names else 3
        axes.scatter(series.x, series.y, s=size, color=palette[series.colour], label=series.label or "_", linewidths=0)
        names = series.names if series.shows_names else ()
        if id(series) in numbers:
            names = (str(numbers[id(series)]),)
        for x, y, name in zip(series.x.tolist(), series.y.tolist(), names, strict=False):
            axes.annotate(name, (x, y), xytext=(3, 2), textcoords="offset points", fontsize=FONT - 2)
    if with_numbers:
        entries = [f"{number} {series.names[0]}" for number, series in with_numbers]
        handles = [axes.plot([], [], ".", color=palette[series.colour])[0] for _, series in with_numbers]
        axes.figure.legend(handles, entries, loc="outside lower left", handlelength=0.6)


def _heat(axes: Axes, chart: Chart, palette: dict[str, str]) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    values = np.array([series.y for series in chart.series])
    colours = LinearSegmentedColormap.from_list("gapless", ["#f4f8fb", palette["chunk"]])
    low, high = chart.shades or (float(np.nanmin(values)), float(np.nanmax(values)))
    axes.imshow(values, aspect="auto", cmap=colours, vmin=low, vmax=high)
    for (row, column), value in np.ndenumerate(values):
        if np.isfinite(value):
            dark = high > low and (value - low) / (high - low) > 0.55
            axes.text(column, row, number_text(float(value)), ha="center", va="center", fontsize=FONT - 1,
                      color="white" if dark else "black")  # fmt: skip
    axes.set_xticks(range(len(chart.categories)), chart.categories)
    axes.set_yticks(range(len(chart.series)), [_shortened(series.label) for series in chart.series])
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(length=0)


_DRAW: dict[str, Callable[[Axes, Chart, dict[str, str]], None]] = {
    "lines": _lines, "steps": _lines, "cdf": _lines, "histogram": _histogram, "areas": _areas, "bars": _bars,
    "scatter": _scatter, "heat": _heat,
}  # fmt: skip
