"""`report.html` of a comparison: metrics side by side, pipelines on one time axis, and charts of all runs."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from ...core.numbers import counted, ms_text, percent_text, seconds_text
from ..drawing.chart import Chart, series_colour
from ..drawing.chart_data import ChartData, fleet_chart_data
from ..drawing.page_parts import (
    IDLE_WORDS,
    error_notes,
    notes_list,
    pairs_table,
    row,
    swatch,
    table,
    template,
    whole_page,
    words_section,
)
from ..drawing.png import write_figures
from ..drawing.svg import figures
from ..drawing.text_table import TextTable
from ..drawing.timeline_block import timeline_scripts, timeline_section
from ..drawing.timeline_columns import MAX_BOXES, TimelineColumns, pack_columns, tick_seconds
from ..drawing.timeline_png import TimelineWindow, write_timeline
from ..ledger.causes import Cause
from ..ledger.fleet import Fleet, replica_name
from ..run_folder.files import PREFILL_KEY, REPLICAS_KEY
from ..run_folder.read import load_fleet
from . import run_charts as charts
from .comparison_charts import TAILS, throughput_against
from .difference.difference_tables import difference_section
from .difference.run_difference import RunDifference
from .difference.run_side import RunSide
from .faults_section import faults_section
from .metrics import (
    BY_CAUSE,
    EVENNESS,
    IDLE,
    KV_TRANSFERS,
    LATENCY,
    MAX_COLUMNS,
    SPEED,
    THROUGHPUT,
    Metric,
    RowUnit,
    Spread,
    has_any,
    lower_is_better,
    number,
    ranked,
    ranking_metrics,
    ratio_text,
    row_unit,
    spread,
)
from .run_groups import RunGroup, differing_keys, settings
from .verdict import verdict

MAX_DRAWN = 8  # settings whose pipelines and charts are drawn; if there are more, the best ones
METRIC_GROUPS = (
    ("Speed", SPEED),
    ("Latency", (*LATENCY, *KV_TRANSFERS)),
    ("Idle time", (*IDLE, *BY_CAUSE)),
    ("Micro-batches", EVENNESS),
)


@dataclass(frozen=True, slots=True)
class DrawnRuns:
    """The drawing data of a comparison: of the median run of each setting, without its record.

    For a fleet, charts show all replicas, and the timeline shows replica 0.

    Attributes:
        tick: Length of the timeline's tick, in seconds.
        runs: Chart data by label, in the order of the settings.
        columns: Timeline columns, in the same order.
        windows: Window of the run for the timeline's PNG, by label.
        sides: What the difference of two runs reads of each; empty if the runs are not two.
    """

    tick: float
    runs: dict[str, ChartData]
    columns: list[TimelineColumns]
    windows: dict[str, TimelineWindow]
    sides: list[RunSide]

    @classmethod
    def of(cls, fleets: Iterable[tuple[str, Fleet]], count: int, seconds: float) -> DrawnRuns:
        """Extract the drawing data of `count` runs, one after the other; the longest lasts `seconds`."""
        drawn = cls(tick_seconds(1.001 * seconds), {}, [], {}, [])
        for label, fleet in fleets:
            drawn.runs[label] = fleet_chart_data(fleet)
            drawn.columns.append(pack_columns(*fleet.parts[0], drawn.tick, MAX_BOXES // count))
            drawn.windows[label] = TimelineWindow.of(fleet.ledgers[0])
            drawn.sides.extend([RunSide(fleet)] if count == 2 else [])
        return drawn

    @property
    def charts(self) -> list[Chart]:
        """The charts that show all runs together."""
        return [
            charts.bubbles_of_runs(self.runs),
            charts.bubble_cdf(self.runs),
            charts.completions(self.runs),
            charts.stage_time_cdf(self.runs),
            *charts.latency_cdfs(self.runs),
        ]

    def write(self, path: Path, more: Sequence[Chart] = (), *, simulated: bool) -> None:
        """Write PNGs of `more` charts, the runs' charts and timelines; `simulated` marks their titles."""
        write_figures(path, [*more, *self.charts, *charts.batch_composition(self.runs)], simulated=simulated)
        mark = ", simulated" if simulated else ""
        write_timeline(path / "timeline.png", {label + mark: window for label, window in self.windows.items()})


def draw_runs(groups: Sequence[RunGroup], sort: str) -> DrawnRuns:
    """Extract the drawing data of each setting's median run, one after the other; if many, of the best by `sort`."""
    best = ranked(groups, sort)[:MAX_DRAWN]
    shown = [group for group in groups if group in best]
    span = max(number(group.median_run.summary, "duration") or 0.0 for group in shown)
    return DrawnRuns.of(((group.label, load_fleet(group.median_run)) for group in shown), len(shown), span)


def charts_of_settings(groups: Sequence[RunGroup], sort: str) -> list[Chart]:
    """Return throughput against tail latency, if there are more than two settings."""
    return [throughput_against(groups, tail, sort) for tail in TAILS] if len(groups) > 2 else []


def render_comparison(
    groups: Sequence[RunGroup],
    drawn: DrawnRuns,
    title: str,
    sort: str,
    *,
    compared: str = "setting",
    whole: Mapping[str, Any] | None = None,
    words: Sequence[str] = (),
    difference: RunDifference | None = None,
) -> str:
    """Render the page of a comparison.

    Args:
        groups: The groups to compare.
        drawn: The drawing data of the groups' median runs.
        title: Heading of the page.
        sort: Key of summary.json that ranks the groups.
        compared: What a group is. Charts over settings are only made for "setting".
        whole: Summary of the fleet, if the groups are its prefill and its decode replicas. These do different work, so
            none is marked as best.
        words: The first sentences of the page, if it has no verdict.
        difference: The difference of the groups, if they are two settings.
    """
    over_settings = charts_of_settings(groups, sort) if compared == "setting" else []
    heads = []
    for place, (label, run) in enumerate(drawn.runs.items()):
        group = next(group for group in groups if group.label == label)
        shown = {"label": label, "note": _run_note(group, run), "colour": series_colour(place)}
        heads.append(shown)
    seconds = {cause: sum(run.cause_seconds[cause] for run in drawn.runs.values()) for cause in Cause}
    which = f"the best {len(drawn.runs)} by {sort}" if len(drawn.runs) < len(groups) else "the median run of each"
    return whole_page(
        template("comparison_page.html", __package__),
        {
            "title": html.escape(title),
            "subtitle": html.escape(_subtitle(groups, compared)),
            "notes": notes_list(error_notes(run.summary for group in groups for run in group.runs)),
            "verdict": words_section(verdict(groups) if compared == "setting" else words),
            "difference": difference_section(difference),
            "table": (_side_by_side if len(groups) <= MAX_COLUMNS else _ranking)(groups, sort, judged=whole is None),
            "table_note": html.escape(_table_note(groups, sort) if whole is None else _pools_note(whole)),
            "timeline": timeline_section(
                "The pipelines over time", seconds, f"All pipelines on one time axis: {which}."
            ),
            "idle_words": IDLE_WORDS,
            "faults": faults_section(_faults(groups, drawn)),
            "over_settings": f"<section>{figures(over_settings)}</section>" if over_settings else "",
            "charts": figures(drawn.charts),
            "compositions": figures(charts.batch_composition(drawn.runs)),
            "settings": _settings(groups),
            "versions": pairs_table(groups[0].runs[0].summary.get("versions") or {}),
            "scripts": timeline_scripts(drawn.tick, drawn.columns, heads),
        },
    )


def _faults(groups: Sequence[RunGroup], drawn: DrawnRuns) -> list[dict[str, Any]]:
    """Return the faults of the drawn runs, each with its run's label."""
    shown = [group for group in groups if group.label in drawn.runs]
    return [{**fault, "run": group.label} for group in shown for fault in group.median_run.summary.get("faults") or ()]


def _subtitle(groups: Sequence[RunGroup], compared: str) -> str:
    runs = [run for group in groups for run in group.runs]
    dates = sorted(str(run.summary.get("date", "")) for run in runs)
    parts = [counted(len(groups), compared), counted(len(runs), "run"), dates[0]]
    return " · ".join(parts).rstrip(" ·")


def _run_note(group: RunGroup, run: ChartData) -> str:
    """Format the numbers next to a pipeline's heading: duration, throughput, idle share."""
    summary = group.median_run.summary
    speed, idle = number(summary, THROUGHPUT.key), number(summary, "bubble_fraction")
    parts = [seconds_text(run.span)]
    parts += [f"{THROUGHPUT.text(speed)} {THROUGHPUT.unit}"] if speed is not None else []
    parts += [f"{percent_text(idle)} idle"] if idle is not None else []
    if REPLICAS_KEY in summary:
        parts.append(f"{replica_name(0, summary.get(PREFILL_KEY, 0))} of {summary[REPLICAS_KEY]}")
    return " · ".join(parts)


def _table_note(groups: Sequence[RunGroup], sort: str) -> str:
    first = groups[0].label
    text = f"Ratios are to {first}."
    if any(len(group.runs) > 1 for group in groups):
        text = f"Medians over the repeats, lowest and highest below. {text}"
    if len(groups) > MAX_COLUMNS:
        text += f" Ranked by {sort}, {'lowest' if lower_is_better(sort) else 'highest'} first."
    return text


def _pools_note(whole: Mapping[str, Any]) -> str:
    """Explain the numbers of a pool's replica, and list those of whole requests."""
    names = {"ttft": "TTFT", "itl": "TBT", "e2el": "E2E", "kv_wait": "KV waits", "kv_transfer": "KV transfer"}
    parts = []
    for key, name in names.items():
        median, p99 = number(whole, f"median_{key}_ms"), number(whole, f"p99_{key}_ms")
        if median is not None and p99 is not None:
            parts.append(f"{name} {ms_text(median)} and {ms_text(p99)}")
    return (
        "A column is of one replica, and counts halves of requests: of a prefill replica the first token of each, of a "
        "decode replica the others, whose TTFT is from the token before. "
        f"p50 and p99 of whole requests: {', '.join(parts)}."
    )


def _side_by_side(groups: Sequence[RunGroup], sort: str, *, judged: bool) -> str:
    """Render a table with one column per setting and one row per metric."""
    heads = [swatch(series_colour(n)) + html.escape(group.label) for n, group in enumerate(groups)]
    rows = []
    num_equal = 0
    for name, metrics in METRIC_GROUPS:
        lines, hidden = [], 0
        for metric in metrics:
            if has_any(groups, metric):
                line, is_equal = _row(groups, metric if judged else replace(metric, judged=False))
                lines.append(line)
                hidden += is_equal
        if lines:
            css = "group equal" if hidden == len(lines) else "group"
            rows += [row(name, [""] * len(groups), css), *lines]
            num_equal += hidden
    width = f"max-width:{280 + 190 * len(groups)}px"
    shown = f"show the {counted(num_equal, 'row')} equal for all"
    toggle = f'<details class="toggle"><summary>{shown}</summary></details>' if num_equal else ""
    return f'{toggle}<div class="scroll">{table(["", *heads], rows, "compared", width)}</div>'


def _row(groups: Sequence[RunGroup], metric: Metric) -> tuple[str, bool]:
    """Render the row of a metric; also return whether its formatted values are equal for all groups."""
    found = [spread(group, metric.key, groups[0]) for group in groups]
    unit = row_unit(metric, [s.median for s in found if s is not None])
    texts = {None if s is None else (unit.text(s.median), unit.text(s.low), unit.text(s.high)) for s in found}
    is_equal = len(groups) > 1 and len(texts) == 1
    css = "member equal" if is_equal else "member"
    head = f"<th>{html.escape(metric.name)}{f' <small>{unit.name}</small>' if unit.name else ''}</th>"
    return f'<tr class="{css}">{head}{"".join(_cells(metric, found, unit))}</tr>', is_equal


def _ranking(groups: Sequence[RunGroup], sort: str, *, judged: bool) -> str:
    """Render a table with one row per setting, best first."""
    metrics = ranking_metrics(groups, sort)
    order = ranked(groups, sort)
    columns, heads = [], []
    for metric in metrics:
        found = [spread(group, metric.key, groups[0]) for group in order]
        unit = row_unit(metric, [s.median for s in found if s is not None])
        columns.append(_cells(metric if judged else replace(metric, judged=False), found, unit))
        below = f"<br><small>{unit.name}</small>" if unit.name else ""
        heads.append(html.escape(metric.name) + below)
    rows = (
        f"<tr><th>{place + 1}. {html.escape(group.label)}</th>{''.join(column[place] for column in columns)}</tr>"
        for place, group in enumerate(order)
    )
    return f'<div class="scroll">{table(["", *heads], rows, "compared")}</div>'


def _cells(metric: Metric, found: Sequence[Spread | None], unit: RowUnit) -> list[str]:
    """Render a metric's cells: the ratio to the first group, the median, and the range over the repeats."""
    medians = [s.median for s in found if s is not None]
    judged = metric.judged and len({unit.text(value) for value in medians}) > 1
    best = unit.text((min if metric.lower_is_better else max)(medians)) if judged else None
    cells = []
    for s in found:
        if s is None:
            cells.append('<td class="zero">-</td>')
            continue
        differs = metric.judged and s.median > 0 and s.ratio is not None and abs(s.ratio - 1.0) >= 5e-3
        ratio = f"<em>{ratio_text(s.ratio)}x</em>" if differs and s.ratio is not None else ""
        low, high = unit.text(s.low), unit.text(s.high)
        several = f"<small>{low} .. {high}</small>" if low != high else ""
        css = ' class="best"' if unit.text(s.median) == best else ""
        cells.append(f"<td{css}>{ratio}{unit.text(s.median)}{several}</td>")
    return cells


def _settings(groups: Sequence[RunGroup]) -> str:
    """Render the keys that differ, with one row per setting; then the shared keys, as YAML."""
    points = [settings(group.runs[0].config) for group in groups]
    keys = differing_keys(points)
    rows = [
        (group.label, *(str(point.get(key, "-")) for key in keys), str(len(group.runs)), str(group.median_run.path))
        for group, point in zip(groups, points, strict=True)
    ]
    shown = TextTable(("", *keys, "runs", "median run"), rows)
    shared = {
        key: value for key, value in points[0].items() if all(key in point and point[key] == value for point in points)
    }
    text = html.escape(yaml.safe_dump(shared, sort_keys=False, allow_unicode=True)) if shared else ""
    return f"{shown.html()}<h2>What all share</h2><pre>{text}</pre>"
