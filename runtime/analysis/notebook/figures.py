"""The charts of a report as matplotlib figures that notebooks display directly."""

from __future__ import annotations

import io

from matplotlib.figure import Figure

from ..drawing.chart import Chart
from ..drawing.png import DPI, draw_chart
from ..drawing.timeline_png import TimelineWindow, draw_timeline


class NotebookFigure(Figure):
    """A figure that notebooks display with or without pyplot."""

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png", dpi=DPI, metadata={"Software": None})
        return file.getvalue()


def chart_figure(chart: Chart) -> Figure:
    """Draw a chart that has data."""
    figure = NotebookFigure(dpi=DPI)
    draw_chart(chart, figure)
    return figure


def timeline_figure(runs: dict[str, TimelineWindow]) -> Figure:
    """Draw windows of runs, by label, one below the other."""
    figure = NotebookFigure(dpi=DPI, layout="constrained")
    draw_timeline(runs, figure)
    return figure
