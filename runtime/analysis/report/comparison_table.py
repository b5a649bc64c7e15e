"""The terminal's table of several settings: side by side, or as a ranking."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from ...core.numbers import counted
from ..drawing.fitting_table import FittingTable
from .metrics import (
    BY_CAUSE,
    MAX_COLUMNS,
    SECTIONS,
    THROUGHPUT,
    Metric,
    Spread,
    best_of,
    has_any,
    lower_is_better,
    ranked,
    ranking_metrics,
    spread,
)
from .run_groups import RunGroup


def comparison_table(groups: Sequence[RunGroup], *, sort: str = THROUGHPUT.key) -> FittingTable:
    """Build the table of a comparison: settings as columns, metrics as rows. More than eight settings are a ranking.

    Values are medians over the repeats, with the largest deviation from the median in percent. The best is bold. On a
    narrow console, columns continue below, and a ranking leaves out its last metrics.

    Args:
        groups: The settings, each with its runs.
        sort: Key of summary.json that sorts a ranking.
    """
    if len(groups) <= MAX_COLUMNS:
        return FittingTable([partial(_side_by_side, groups, count) for count in range(len(groups), 0, -1)])
    metrics = ranking_metrics(groups, sort)
    return FittingTable([partial(_ranking, groups, sort, metrics[:n]) for n in range(len(metrics), 0, -1)])


def _side_by_side(groups: Sequence[RunGroup], count: int) -> Group:
    """Build the tables of the settings, at most `count` in each."""
    return Group(*(_columns(groups, first, count) for first in range(0, len(groups), count)))


def _columns(groups: Sequence[RunGroup], start: int, count: int) -> Table:
    """Build the columns of up to `count` groups, starting at group `start`. Ratios and the best are over all groups."""
    title = _heading(groups) if start == 0 else None
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("", no_wrap=True)
    for group in groups[start : start + count]:
        table.add_column(_break_heading(group.label), justify="right", no_wrap=True)
    for section in SECTIONS:
        rows = [metric for metric in section if has_any(groups, metric)]
        for metric in rows:
            found = [spread(group, metric.key, groups[0]) for group in groups]
            name = metric.name + (f" ({metric.unit})" if metric.unit else "")
            table.add_row(name, *_cells(metric, found)[start : start + count])
            if metric is THROUGHPUT and len(groups) > 1:
                table.add_row("speed-up", *[_ratio(s) for s in found][start : start + count])
        if rows:
            table.add_section()
        if section is BY_CAUSE and rows:
            table.caption, table.caption_justify = "Times by cause are stage-seconds.", "left"
    return table


def _ranking(groups: Sequence[RunGroup], sort: str, metrics: Sequence[Metric]) -> Table:
    """Build a table with one row per group, best first."""
    table = Table(title=_heading(groups), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("setting", no_wrap=True)
    for name in ("speed-up", *(metric.name for metric in metrics)):
        table.add_column(_break_heading(name), justify="right", no_wrap=True)
    order = ranked(groups, sort)
    columns = [_cells(metric, [spread(c, metric.key, groups[0]) for c in order]) for metric in metrics]
    for place, group in enumerate(order):
        speed = spread(group, THROUGHPUT.key, groups[0])
        table.add_row(str(place + 1), group.label, _ratio(speed), *(column[place] for column in columns))
    way = "lowest" if lower_is_better(sort) else "highest"
    table.caption = f"ranked by {sort}, {way} first; speed-up over {groups[0].label}"
    table.caption_justify = "left"
    return table


def _heading(groups: Sequence[RunGroup]) -> str:
    runs = sum(len(group.runs) for group in groups)
    settings = counted(len(groups), "setting")
    return f"{settings}, {runs} runs: median ± largest deviation" if runs > len(groups) else settings


def _break_heading(name: str) -> str:
    """Break a column's heading into lines at its spaces."""
    return name.replace(" ", "\n")


def _cells(metric: Metric, found: Sequence[Spread | None]) -> list[Text]:
    best = best_of(metric, found)
    return [Text(_value(metric, s), "bold" if s is not None and metric.text(s.median) == best else "") for s in found]


def _value(metric: Metric, s: Spread | None) -> str:
    if s is None:
        return "-"
    deviation = max(s.high - s.median, s.median - s.low)
    suffix = f" ±{100 * deviation / abs(s.median):.0f}%" if deviation > 0 and s.median else ""
    return metric.text(s.median) + suffix


def _ratio(s: Spread | None) -> str:
    return "-" if s is None or s.ratio is None else f"{s.ratio:.2f}x"
