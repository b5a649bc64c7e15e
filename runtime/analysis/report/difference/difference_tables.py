"""The tables of the difference of two runs, the makespan by part and stage and the requests, and its section."""

from __future__ import annotations

import html
from collections.abc import Sequence

from ....core.numbers import seconds_text
from ...drawing.page_parts import section
from ...drawing.text_table import RowKind, TextTable
from .difference_words import changed_words, makespan_words, part_label, signed_text
from .makespan_difference import COMPUTE_PARTS, PARTS, MakespanDifference
from .run_difference import RunDifference
from .run_side import COMPUTE

MAX_STAGES = 8  # with a column each
_LEAST = 5e-7  # seconds; less is printed as 0
_MAX_REQUESTS = 10
_HINT = (
    "On each stage the makespan is compute and the idle time of each cause, so the parts of its change sum exactly. "
    "Work is compute for other or more micro-batches, speed is compute for the same ones. What a stage does more "
    "slowly itself, the others wait for."
)

Row = tuple[str, Sequence[float | None]]  # a label; the seconds of each run, the change, and the change on each stage


def difference_tables(difference: RunDifference) -> list[TextTable]:
    """Return the tables of numbers: the makespan, and requests."""
    tables = [makespan_table(difference.makespan, difference.labels)]
    return [*tables, request_table(difference)] if difference.requests else tables


def difference_section(difference: RunDifference | None) -> str:
    """Render the section of a page; empty if two runs are not what is compared."""
    if difference is None:
        return ""
    words = html.escape(" ".join([changed_words(difference), *makespan_words(difference)]))
    tables = "".join(table.html() for table in difference_tables(difference))
    return section("What makes the difference", f"  <p>{words}</p>\n{tables}", _HINT)


def ranked_stages(found: MakespanDifference) -> list[int]:
    """Return up to `MAX_STAGES` stages by priority for display.

    The first is the origin of the change, then the first stage, the last, and those that differ most. Empty for a
    pipeline of one stage, or if the runs' stages differ.
    """
    stages = range(len(found.by_stage)) if len(found.by_stage) > 1 else range(0)
    if not stages:
        return []
    most = sorted(stages, key=lambda stage: -max(map(abs, found.by_stage[stage].values())))
    first = [] if found.origin.stage is None else [found.origin.stage]
    return list(dict.fromkeys([*first, 0, stages[-1], *most]))[:MAX_STAGES]


def makespan_table(found: MakespanDifference, labels: tuple[str, str]) -> TextTable:
    """Build the table of the makespan by part with non-zero time: in the mean of the stages, and the change on each."""
    rows: list[Row] = []
    for part in (COMPUTE, *PARTS):
        of = COMPUTE_PARTS if part == COMPUTE else (part,)
        changes = [sum(each[p] for p in of) for each in (found.parts, *found.by_stage)]
        seconds = found.before.get(part), found.after.get(part)
        if part == COMPUTE or max(map(abs, (*changes, *(each or 0.0 for each in seconds)))) > _LEAST:
            rows.append((part_label(part), [*seconds, *changes]))
    kinds: dict[int, RowKind] = {n: "member" for n, row in enumerate(rows) if row[1][0] is None}
    rows.append(("makespan", [found.base, found.run, *[found.change] * (1 + len(found.by_stage))]))
    ranked = ranked_stages(found)
    shown = sorted(ranked)
    heads = ("", *labels, "change", *(found.stage_names[1][stage] for stage in shown))
    columns = [2, *(3 + stage for stage in shown)]
    cells = [
        (label, *map(_text, seconds[:2]), *(signed_text(seconds[column] or 0.0) for column in columns))
        for label, seconds in rows
    ]
    optional = [found.stage_names[1][stage] for stage in ranked]
    title = "Makespan: mean of the stages"
    return TextTable(heads, cells, title, optional=optional, kinds={**kinds, len(rows) - 1: "total"})


def _text(seconds: float | None) -> str:
    return "" if seconds is None else seconds_text(seconds)


def request_table(difference: RunDifference) -> TextTable:
    """Build the table of the requests whose end-to-end latency changed most."""
    rows = [
        (
            f"request {each.request}",
            f"{each.base.prompt:,} + {each.base.output:,}",
            seconds_text(each.base.latency),
            seconds_text(each.run.latency),
            signed_text(each.change),
            signed_text(each.run.bubble - each.base.bubble),
        )
        for each in difference.requests[:_MAX_REQUESTS]
    ]
    heads = ("", "prompt + output tokens", *difference.labels, "change", "of its bubble time")
    return TextTable(heads, rows, "Requests, by change from arrival to last token", optional=("of its bubble time",))
