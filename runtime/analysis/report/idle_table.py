"""Idle time by cause, on each stage, with the parts that come from the run's root causes."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...core.numbers import percent_text, seconds_text
from ..drawing.formatting import cause_label
from ..drawing.page_parts import idle_swatch, swatch, table
from ..drawing.text_table import RowKind, TextTable
from ..explain.cause_words import cause_name, part_text
from ..explain.sized_cause import COMPUTE, SizedCause, parts
from ..ledger.causes import BUBBLES, CAUSES, STARVED, Cause
from ..ledger.fleet import Fleet

_FEW_STAGES = 2  # of which none is marked as the busiest
_GROUPS = (
    (
        "bubbles",
        BUBBLES,
        "Idle time without starved, unknown, recovery, fill and drain: work was there, the stage waited for it.",
    ),
    ("starved", STARVED, "No admissible work existed."),
    ("", (Cause.UNKNOWN, Cause.RECOVERY, Cause.FILL_DRAIN), ""),
)


@dataclass(frozen=True, slots=True)
class IdleRow:
    """A row of the table: seconds of all stages and of each; the part of a root cause has none of each."""

    label: str
    kind: RowKind
    seconds: float
    by_stage: Sequence[float] = ()
    cause: Cause | None = None
    meaning: str = ""


def idle_rows(times: Fleet, causes: Sequence[SizedCause]) -> Iterator[IdleRow]:
    """Yield the rows: groups with their causes, all idle time, compute; below each, its parts from `causes`."""
    total = times.seconds_by_cause()
    by_stage = [times.seconds_by_cause(stage) for stage in range(times.num_stages)]

    def row(label: str, kind: RowKind, of: Sequence[Cause], meaning: str, cause: Cause | None = None) -> IdleRow:
        each = [sum(seconds[one] for one in of) for seconds in by_stage]
        return IdleRow(label, kind, sum(total[one] for one in of), each, cause, meaning)

    def roots(shown: str) -> Iterator[IdleRow]:
        for each, part in parts(causes, shown, times.stage_seconds or 1.0):
            yield IdleRow(f"of which {cause_name(each)}", "root", part)

    for name, group, meaning in _GROUPS:
        if name:
            yield row(name, "group", group, meaning)
        for cause in group if name else [cause for cause in group if total[cause]]:
            yield row(cause_label(cause), "member" if name else "", [cause], cause.meaning, cause)
            yield from roots(cause)
    yield row("idle", "total", CAUSES, "With the compute time, exactly the run's span on every stage.")
    busy = [times.busy_seconds(stage) for stage in range(times.num_stages)]
    yield IdleRow("compute", "", times.busy_seconds(), busy)
    yield from roots(COMPUTE)


def bubble_table(times: Fleet, causes: Sequence[SizedCause] = ()) -> TextTable:
    """Build the terminal's table, without causes of no idle time.

    If not all stages fit the console, the busiest is kept longest, then the first, the last and the idlest.
    """
    stages = range(times.num_stages)
    busy = [times.busy_seconds(stage) for stage in stages]
    marks = {busy.index(min(busy)): "\nidlest", busy.index(max(busy)): "\nbusiest"}
    shown = stages if len(stages) > 1 else range(0)
    kept = [stage for stage in dict.fromkeys([busy.index(max(busy)), 0, stages[-1], *marks, *stages]) if stage in shown]
    are_many = len(stages) > _FEW_STAGES
    heads = [times.stage_name(s) + (marks.get(s, "") if are_many else "") for s in shown]
    rows: list[tuple[str, ...]] = []
    kinds: dict[int, RowKind] = {}
    for each in idle_rows(times, causes):
        if each.seconds or not each.cause:
            each_stage = [seconds_text(each.by_stage[s]) if each.by_stage else "" for s in shown]
            share = percent_text(each.seconds / (times.stage_seconds or 1.0))
            kinds[len(rows)] = each.kind
            rows.append((each.label, part_text(each.seconds), share, *each_stage))
    share = "of stage\ntime" if are_many else "of stage time"
    columns = ("cause", "stage-s" if len(stages) > 1 else "seconds", share, *heads)
    return TextTable(columns, rows, "Idle time", optional=[heads[stage] for stage in kept], kinds=kinds)


def idle_section(times: Fleet, causes: Sequence[SizedCause]) -> str:
    """Render a page's table, with the colour, the meaning and a bar for each cause."""
    whole, idle = times.stage_seconds or 1.0, sum(times.seconds_by_cause().values()) or 1.0
    rows = []
    for each in idle_rows(times, causes):
        sample = idle_swatch(each.cause) if each.cause else swatch("busy") if each.label == COMPUTE else ""
        has_bar = each.kind != "root" and each.label != COMPUTE
        bar = f'<b style="width:{72 * each.seconds / idle:.1f}px"></b>' if has_bar else ""
        cells = f'<td>{part_text(each.seconds)}</td><td class="share">{bar}{percent_text(each.seconds / whole)}</td>'
        for seconds in each.by_stage:
            cells += f'<td class="{"" if seconds > 0 else "zero"}">{seconds_text(seconds)}</td>'
        cells += "" if each.by_stage else "<td></td>" * times.num_stages
        head = f"{sample}{html.escape(each.label)}<small>{html.escape(each.meaning)}</small>"
        rows.append(f'<tr class="{each.kind}"><th>{head}</th>{cells}</tr>')
    stages = map(times.stage_name, range(times.num_stages))
    return table(["cause", "stage-seconds", "of stage time", *stages], rows, "bubbles")
