"""The two charts of the experiments: lines, and stacked bars by operator."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gapless.runtime.analysis.drawing.chart import Axis, Chart, Series, series_colour, stacked_bars


def line_chart(name: str, title: str, x: Axis, y: Axis, lines: Mapping[str, Mapping[int, float]]) -> Chart:
    """Make a chart of `lines`: values by x, by label."""
    series = tuple(
        Series(label, np.array(list(by), np.float64), np.array(list(by.values())), series_colour(place))
        for place, (label, by) in enumerate(lines.items())
    )
    return Chart(name, title, "lines", x, y, series)


def bar_chart(name: str, title: str, axis: Axis, bars: Mapping[str, Mapping[str, float]]) -> Chart:
    """Make a chart of stacked bars: lengths by part, by category; all categories have the same parts."""
    colours = {part: series_colour(place) for place, part in enumerate(next(iter(bars.values())))}
    return stacked_bars(name, title, axis, list(bars.items()), colours)
