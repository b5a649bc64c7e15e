"""Tables for the terminal: of one run, and of several settings side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..core.numbers import counted
from ..core.run_record import RunRecord
from ..drawing.fitting_table import FittingTable
from ..drawing.formatting import cause_label, ms_text, percent_text, seconds_text
from ..explain.cause_words import cause_name, causes_listed, part_text
from ..explain.sized_cause import COMPUTE, SizedCause, parts
from ..ledger.blame import Blame
from ..ledger.causes import CAUSES, Cause
from ..ledger.fleet import Fleet
from .blame_section import request_name, top_requests
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
    metric_of,
    ranked,
    spread,
)
from .run_groups import RunGroup

_MAX_FAULTS = 10  # that have a line each
_MOST_BLAMED = 3

# Metrics of a ranking, the most important first: the last ones are left out where the terminal is narrow.
_RANKED_BY = (
    *("output_throughput", "p99_itl_ms", "p99_ttft_ms", "bubble_fraction"),
    *("cv_stage_time", "median_itl_ms", "median_ttft_ms", "bubble_fraction_inner"),
)
RANKING_METRICS = tuple(map(metric_of, _RANKED_BY))


def bubble_table(times: Fleet, causes: Sequence[SizedCause] = ()) -> FittingTable:
    """Make the table of idle time: by cause its seconds, its share of all stage time, and its seconds on each stage.

    Below each cause, and below compute, is what of it comes from each of the run's root `causes`. Causes without idle
    time are left out. If the console has no room for all stages, the first, the busiest, the idlest
    and the last have a column; if that is too wide, fewer have.
    """
    stages = list(range(times.num_stages))
    busy = [times.busy_seconds(stage) for stage in stages]
    busiest = busy.index(max(busy))
    marked = {stages[0]: "", stages[-1]: "", busy.index(min(busy)): "idlest", busiest: "busiest"}
    wanted = [dict.fromkeys(stages, "") if len(stages) > 1 else {}]
    for kept in (marked.keys(), {0, busiest, stages[-1]}, {busiest}, ()):
        wanted.append({stage: marked[stage] for stage in sorted(kept)})
    return FittingTable([partial(_bubbles_of, times, shown, causes) for shown in wanted])


def _bubbles_of(times: Fleet, stages: Mapping[int, str], causes: Sequence[SizedCause]) -> Table:
    """Make the table of idle time with a column for each of `stages`: their numbers, and a remark for the heading."""
    table = Table(title="Idle time", title_justify="left", caption_justify="left")
    table.add_column("cause", no_wrap=True)
    heads = (times.stage_name(stage) + (f"\n{remark}" if remark else "") for stage, remark in stages.items())
    share = "of stage time" if len(stages) in (0, times.num_stages) else "of stage\ntime"
    for name in ("stage-s" if times.num_stages > 1 else "seconds", share, *heads):
        table.add_column(name, justify="right", no_wrap=True)
    total = times.seconds_by_cause()
    by_stage = [times.seconds_by_cause(stage) for stage in stages]
    whole = times.stage_seconds or 1.0

    def add_roots(shown: str) -> None:
        for each, part in parts(causes, shown, whole):
            cells = part_text(part), percent_text(part / whole)
            table.add_row(f"  from {cause_name(each)}", *cells, *("" for _ in stages), style="dim")

    for cause in CAUSES:
        if total[cause] > 0:
            values = (seconds_text(seconds[cause]) for seconds in by_stage)
            table.add_row(cause_label(cause), seconds_text(total[cause]), percent_text(total[cause] / whole), *values)
            add_roots(cause)
    table.add_section()
    idle, busy = sum(total.values()), times.busy_seconds()
    values = (seconds_text(sum(seconds.values())) for seconds in by_stage)
    table.add_row("idle", seconds_text(idle), percent_text(idle / whole), *values, style="bold")
    values = (seconds_text(times.busy_seconds(stage)) for stage in stages)
    table.add_row("compute", seconds_text(busy), percent_text(busy / whole), *values)
    add_roots(COMPUTE)
    others = "starved, unknown, recovery" if total[Cause.UNKNOWN] else "starved, recovery"
    table.caption = (
        f"bubbles: {percent_text(times.bubble_fraction_inner)} of stage time\n"
        f"(idle time without {others}, fill and drain)"
    )
    return table


def causes_table(causes: Sequence[SizedCause]) -> Table:
    """Make the table of what is worth mending: what each cause costs, its range, and the change that undoes it."""
    table = Table(title="Causes", title_justify="left")
    heads, rows = causes_listed(causes)
    for name in heads:
        is_text = name in ("cause", "change")
        table.add_column(name, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold")
    for cells in rows:
        table.add_row(*cells)
    return table


def latency_table(summary: Mapping[str, Any]) -> Table:
    """Make the table of TTFT, TBT, TPOT, end-to-end latency and KV transfers, if any: mean, p50, p90, p99."""
    table = Table(title="Latency", title_justify="left")
    table.add_column("", no_wrap=True)
    for name in ("mean", "p50", "p90", "p99"):
        table.add_column(name, justify="right", no_wrap=True)
    names = {"ttft": "TTFT", "itl": "TBT", "tpot": "TPOT", "e2el": "end to end"}
    names |= {"kv_wait": "KV waits", "kv_transfer": "KV transfer"} if "mean_kv_wait_ms" in summary else {}
    for key, name in names.items():
        values = (summary[f"{statistic}_{key}_ms"] for statistic in ("mean", "median", "p90", "p99"))
        table.add_row(name, *(ms_text(value or (0.0 if key.startswith("kv") else None)) for value in values))
    return table


def blame_table(record: RunRecord, blame: Blame) -> RenderableType:
    """Make the table of the requests that cost others most; "" if none cost others anything.

    Where the console is narrow, it leaves out what the requests themselves lost, then their sizes.
    """
    places = top_requests(blame, _MOST_BLAMED)
    return FittingTable([partial(_blame_of, record, blame, places, n) for n in (5, 4, 3, 2)]) if places else ""


def _blame_of(record: RunRecord, blame: Blame, places: Sequence[int], columns: int) -> Table:
    table = Table(title="Who cost others time", title_justify="left")
    table.add_column("", no_wrap=True, overflow="ellipsis")
    for name in ("cost TTFT", "cost TBT", "prompt", "output", "lost")[:columns]:
        table.add_column(name, justify="right", no_wrap=True)
    for place in places:
        request, ttft, tbt = record.requests[place], blame.ttft, blame.tbt
        cost, lost = (ttft.cost[place], tbt.cost[place]), ttft.lost[place] + tbt.lost[place]
        sizes = f"{request.prompt_tokens:,}", f"{request.output_tokens:,}"
        cells = *(seconds_text(float(each)) for each in cost), *sizes, seconds_text(float(lost))
        table.add_row(Text(request_name(request)), *cells[:columns])
    return table


def stages_left(count: int) -> str:
    """Write how many stages there are since a fault."""
    return f"{counted(count, 'stage')} from then on"


def met_the_next(fault: Mapping[str, Any]) -> bool:
    """Return whether the next fault came before the repair's end."""
    return fault["seconds"] is not None and fault["parts"].keys() == {"detect"}


def fault_lines(summary: Mapping[str, Any]) -> list[str]:
    """Write a line for each fault of the run's pipeline: when and why, how long until it stood again, what it cost.

    There are lines for the first `_MAX_FAULTS`, and one for all others.
    """
    lines, faults = [], summary.get("faults", [])
    for fault in faults[:_MAX_FAULTS]:
        seconds = fault["seconds"]
        ended = "not recovered" if seconds is None else f"recovered in {seconds_text(seconds)}"
        if met_the_next(fault):
            ended = f"the next fault came after {seconds_text(seconds)}"
        again = f"{counted(fault['requests'], 'request')} and {counted(fault['tokens'], 'token')} computed again"
        if fault["replay"]:
            again += f" in {seconds_text(fault['replay'])}"
        if fault.get("stages") is not None:
            ended += f" with {stages_left(fault['stages'])}"
        of = f" of replica {fault['replica']}" if "replica" in fault else ""
        lines.append(f"fault{of} at {fault['time']:,.2f} s ({fault['reason']}): {fault['text']}; {ended}, {again}")
    if len(faults) > _MAX_FAULTS:
        seconds = seconds_text(summary["recovery_seconds"])
        lines.append(f"and {len(faults) - _MAX_FAULTS:,} more; all faults together lasted {seconds}")
    return lines


def straggler_lines(summary: Mapping[str, Any]) -> list[str]:
    """Write a line for each of the first `_MAX_FAULTS` stages that were slow for a while, and one for all others."""
    stragglers = summary.get("stragglers", [])
    lines = [
        f"stage {each['stage']} computed {each['slowdown']:.1f} times as long as usual from {each['start']:,.2f} s to "
        f"{each['end']:,.2f} s; the others waited {seconds_text(each['waited'])} for it"
        for each in stragglers[:_MAX_FAULTS]
    ]
    if len(stragglers) > _MAX_FAULTS:
        waited = seconds_text(sum(each["waited"] for each in stragglers[_MAX_FAULTS:]))
        lines.append(f"and {len(stragglers) - _MAX_FAULTS:,} more times, for which others waited {waited}")
    return lines


def comparison_table(groups: Sequence[RunGroup], *, sort: str = THROUGHPUT.key) -> FittingTable:
    """Make the table of a comparison: settings as columns, metrics as rows. More than eight settings are a ranking.

    Values are medians over the repeats, with the largest deviation from the median in percent. The best is bold. Where
    the console is narrow, columns continue below, and a ranking leaves out its last metrics.

    Args:
        groups: The settings, each with its runs.
        sort: Key of summary.json that orders a ranking.
    """
    if len(groups) <= MAX_COLUMNS:
        return FittingTable([partial(_side_by_side, groups, count) for count in range(len(groups), 0, -1)])
    metrics = [metric for metric in RANKING_METRICS if has_any(groups, metric)]
    if sort not in [metric.key for metric in metrics]:
        metrics.insert(0, metric_of(sort))
    return FittingTable([partial(_ranking, groups, sort, metrics[:n]) for n in range(len(metrics), 0, -1)])


def _side_by_side(groups: Sequence[RunGroup], count: int) -> Group:
    """Make the tables of the settings, at most `count` in each."""
    return Group(*(_columns(groups, first, count) for first in range(0, len(groups), count)))


def _columns(groups: Sequence[RunGroup], start: int, count: int) -> Table:
    """Make the columns of up to `count` groups, from group `start` on. Ratios and the best are over all groups."""
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
    """Make a table with a row for each group, the best first."""
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
    """Break a column's heading into lines at its spaces, and nowhere inside a name."""
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
