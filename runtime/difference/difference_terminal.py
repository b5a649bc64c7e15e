"""Tables of the difference of two runs for the terminal: makespan by part, requests, tails."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from rich.console import Group
from rich.table import Table

from ..drawing.fitting_table import FittingTable
from ..drawing.formatting import seconds_text
from .difference import COMPUTE, COMPUTE_PARTS, LEDGER_PARTS, PARTS, MakespanDifference
from .difference_words import LATENCY_NAMES, TAIL_LABELS, part_label, signed_text
from .request_difference import RequestDifference
from .run_difference import BASE, RUN
from .tail_difference import TAIL_PARTS, Latency, Tail, TailDifference

_LEAST = 5e-7  # seconds; less is written as 0
_MAX_REQUESTS = 6


@dataclass(frozen=True, slots=True)
class PartRow:
    """A row of the table of parts: seconds of each run where they have them, the change, and that on each stage."""

    part: str
    label: str
    base: float | None
    run: float | None
    change: float
    by_stage: Sequence[float]


def makespan_rows(found: MakespanDifference) -> list[PartRow]:
    """Return the parts that differ or last: compute, what its change is made of, and each cause."""

    def row(name: str, label: str, parts: Sequence[str]) -> PartRow:
        change, *by_stage = (sum(each[part] for part in parts) for each in (found.parts, *found.by_stage))
        return PartRow(name, label, found.before.get(name), found.after.get(name), change, by_stage)

    each = [row(part, part_label(part), [part]) for part in PARTS]
    shown = [
        one for one in each if max(map(abs, (one.base or 0.0, one.run or 0.0, one.change, *one.by_stage))) > _LEAST
    ]
    return [row(COMPUTE, COMPUTE, COMPUTE_PARTS), *shown]


def ranked_stages(found: MakespanDifference) -> list[int]:
    """Return the stages in the order in which they are worth showing.

    That is where the change begins, the first, the last, then those that differ most. There are none of a pipeline of
    one stage, or where the runs' stages are not the same.
    """
    stages = range(len(found.by_stage)) if len(found.by_stage) > 1 else range(0)
    if not stages:
        return []
    most = sorted(stages, key=lambda stage: -max(map(abs, found.by_stage[stage].values())))
    first = [] if found.origin.stage is None else [found.origin.stage]
    return list(dict.fromkeys([*first, 0, stages[-1], *most]))


def makespan_table(found: MakespanDifference) -> FittingTable:
    """Make the table of the makespan's change by part, in the mean of the stages, and on each stage.

    Stages that the console has no room for are left out.
    """
    ranked = ranked_stages(found)
    return FittingTable([partial(_parts_of, found, sorted(ranked[:n])) for n in range(len(ranked), -1, -1)])


def _parts_of(found: MakespanDifference, stages: Sequence[int]) -> Table:
    table = Table(title="Makespan: mean of the stages", title_justify="left", caption_justify="left")
    table.add_column("", no_wrap=True)
    for name in (BASE, RUN, "change", *(found.stage_names[1][stage] for stage in stages)):
        table.add_column(name, justify="right", no_wrap=True)
    for row in makespan_rows(found):
        seconds = ["" if value is None else seconds_text(value) for value in (row.base, row.run)]
        label = f"  {row.label}" if row.part in COMPUTE_PARTS else row.label
        table.add_row(label, *seconds, signed_text(row.change), *(signed_text(row.by_stage[s]) for s in stages))
    table.add_section()
    change = [signed_text(found.change)] * (1 + len(stages))
    table.add_row("makespan", seconds_text(found.base), seconds_text(found.run), *change, style="bold")
    return table


def tail_table(tails: Mapping[Latency, TailDifference]) -> FittingTable:
    """Make the table of the P99s by part; where the console has no room for both, a table of each."""
    each = Group(*(_tails_of({name: tail}) for name, tail in tails.items()))
    return FittingTable([partial(_tails_of, tails), lambda: each])


def _tails_of(tails: Mapping[Latency, TailDifference]) -> Table:
    names = list(tails)
    table = Table(title=" and ".join(LATENCY_NAMES[name] for name in names), title_justify="left")
    table.add_column("", no_wrap=True)
    for name in names:
        short = LATENCY_NAMES[name].removeprefix("P99 ") + "\n" if len(names) > 1 else ""
        for column in (f"{short}{BASE}", RUN, "change"):
            table.add_column(column, justify="right", no_wrap=True, vertical="bottom")
    for part in TAIL_PARTS:
        values = [(tails[name].base.parts[part], tails[name].run.parts[part]) for name in names]
        if max(abs(value) for pair in values for value in pair) > _LEAST:
            table.add_row(TAIL_LABELS[part], *_cells(values))
    table.add_section()
    table.add_row("P99", *_cells([(tails[n].base.seconds, tails[n].run.seconds) for n in names]), style="bold")
    return table


def _cells(values: Sequence[tuple[float, float]]) -> list[str]:
    return [text for base, run in values for text in (seconds_text(base), seconds_text(run), signed_text(run - base))]


def tail_requests(tail: Tail, most: int = 5) -> str:
    """Write whose intervals a P99 was read off."""
    named = ", ".join(str(request) for request, _ in tail.requests[:most])
    more = f" and {len(tail.requests) - most} more" if len(tail.requests) > most else ""
    what = "request" if len(tail.requests) == 1 else "requests"
    return f"{what} {named}{more}"


@dataclass(frozen=True, slots=True)
class RequestRow:
    """A row of the table of requests."""

    name: str
    tokens: str
    change: float
    most: str  # the part that changed most


def request_rows(found: RequestDifference, most: int = _MAX_REQUESTS) -> list[RequestRow]:
    """Return the requests, or groups, of the largest changes, then all others, and what no request has.

    They sum to the change of the makespan.
    """
    named = [each for each in found.changes if each.requests != (0, 0)]
    rest = [each for each in found.changes if each.requests == (0, 0)]
    rows = []
    for each in named[:most]:
        where = {(0, 1): f", only {RUN}", (1, 0): f", only {BASE}"}.get(each.requests, "")
        name = each.name + (where if found.by_id else f" ({each.requests[0]:,} and {each.requests[1]:,})")
        rows.append(RequestRow(name, f"{each.tokens[0]:,} + {each.tokens[1]:,}", each.change, _most(each.parts)))
    others = named[most:]
    if others:
        parts = {part: sum(each.parts[part] for each in others) for part in LEDGER_PARTS}
        rows.append(RequestRow(f"{len(others):,} others", "", sum(parts.values()), _most(parts)))
    rows += [RequestRow(each.name, "", each.change, _most(each.parts)) for each in rest if abs(each.change) > _LEAST]
    return rows


def _most(parts: Mapping[str, float]) -> str:
    part = max(parts, key=lambda each: abs(parts[each]))
    return f"{part_label(part)} {signed_text(parts[part])}" if abs(parts[part]) > _LEAST else ""


def request_table(found: RequestDifference) -> Table:
    """Make the table of requests, or of groups where the runs' requests are not the same."""
    table = Table(title="Makespan by request: mean of the stages", title_justify="left")
    for name in ("", "tokens", "change", "most of it"):
        table.add_column(name, justify="right" if name in ("tokens", "change") else "left", no_wrap=True)
    for row in request_rows(found):
        table.add_row(row.name, row.tokens, signed_text(row.change), row.most)
    return table
