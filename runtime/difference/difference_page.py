"""`diff.html`: the difference of two runs in words, as waterfalls and tables, with both pipelines on one time axis."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from ..drawing.chart import series_colour
from ..drawing.formatting import css_name, seconds_text
from ..drawing.page_parts import error_notes, notes_list, row, table, template, whole_page
from ..drawing.svg import figures
from ..drawing.timeline_block import timeline_scripts, timeline_section
from ..ledger.causes import Cause
from ..report.comparison_page import DrawnRuns
from .difference import SPEED, STAGES, WORK
from .difference_terminal import PartRow, makespan_rows, ranked_stages, request_rows, tail_requests
from .difference_words import LATENCY_NAMES, TAIL_LABELS, paragraphs, part_label, signed_text
from .run_difference import BASE, RUN, RunDifference
from .tail_difference import Latency, Tail, TailDifference
from .waterfall import Waterfall, WaterfallStep, ends, waterfall_figure

MAX_STAGES = 8  # that have a waterfall each
_MAX_NAMED = 2  # changed settings in the title
_COLOURS = {
    WORK: "chunk",
    SPEED: "decode",
    STAGES: "s3",
    "queue": "queue",
    "no_room": "starved-kv-full",
    "turn": "starved-in-flight",
    "kv_transfer": "s5",
    "recovery": "recovery",
    "control": "control",
    "result": "s3",
    "unknown": "s7",
    "wait": "pb1-prefill-size",
    "transport": "transport",
    "compute": "busy",
}


def render_difference(difference: RunDifference) -> str:
    """Render the page."""
    found = difference.makespan
    changed, (first, *rest), tails = (list(map(html.escape, texts)) for texts in paragraphs(difference))
    drawn, heads = _drawn(difference)
    seconds = {cause: sum(run.cause_seconds[cause] for run in drawn.runs.values()) for cause in Cause}
    return whole_page(
        template("difference_page.html", __package__),
        {
            "title": html.escape(_title(difference)),
            "subtitle": html.escape(
                " · ".join(
                    f"{name}: {folder.title} ({folder.path})"
                    for name, folder in zip((BASE, RUN), difference.folders, strict=True)
                )
            ),
            "notes": notes_list(error_notes(folder.summary for folder in difference.folders)),
            "words": f"<p><b>{first}</b></p>" + "".join(f"<p>{' '.join(p)}</p>" for p in (changed, rest, tails) if p),
            "changed": _changed(difference),
            "makespan": _waterfalls(difference),
            "parts": _parts_table(
                makespan_rows(found), _shown_stages(difference), found.stage_names[1], found.base, found.run
            ),
            "tails": _tails(difference),
            "requests_hint": _REQUESTS_HINT,
            "requests": _requests(difference),
            "timeline": timeline_section("Both pipelines over time", seconds, "Both on one time axis."),
            "charts": figures(drawn.charts),
            "scripts": timeline_scripts(drawn.tick, drawn.columns, heads),
        },
        "\n.changed td:nth-child(n+2), .changed th:nth-child(n+2) { text-align: left; white-space: normal; }\n",
    )


def _title(difference: RunDifference) -> str:
    changed = difference.changed
    if not changed:
        return "Difference of two runs of one setting"
    named = [f"{each.name}: {each.base} \N{RIGHTWARDS ARROW} {each.run}" for each in changed[:_MAX_NAMED]]
    more = f" and {len(changed) - _MAX_NAMED} more" if len(changed) > _MAX_NAMED else ""
    return f"Difference: {'; '.join(named)}{more}"


_REQUESTS_HINT = (
    "A micro-batch's compute, and the idle time right before it, are divided among its requests by what their tokens "
    "cost; fill, drain and idle time before no request's micro-batch are no request's."
)


def _waterfall(title: str, base: float, run: float, parts: Mapping[str, float]) -> Waterfall:
    steps = [WaterfallStep(part_label(part), seconds, _colour(part)) for part, seconds in parts.items()]
    return Waterfall(title, base, run, steps)


def _colour(part: str) -> str:
    return _COLOURS[part] if part in _COLOURS and part not in ("transport", "control") else css_name(Cause(part))


def _shown_stages(difference: RunDifference) -> list[int]:
    """Return the stages that have a column and a picture."""
    return sorted(ranked_stages(difference.makespan)[:MAX_STAGES])


def _waterfalls(difference: RunDifference) -> str:
    """Render the makespan's waterfall in the mean of the stages, and those of single stages on the same axis."""
    found, shown = difference.makespan, _shown_stages(difference)
    waterfalls = [_waterfall("mean of the stages" if shown else "makespan", found.base, found.run, found.parts)]
    waterfalls += [_waterfall(found.stage_names[1][s], found.base, found.run, found.by_stage[s]) for s in shown]
    axis = ends(waterfalls)
    drawn = "".join(waterfall_figure(each, axis) for each in waterfalls)
    some = len(shown) < len(found.by_stage) > 1
    left_out = f'<p class="hint">{len(shown)} of {len(found.by_stage)} stages are shown.</p>' if some else ""
    return f'<div class="figures">{drawn}</div>{left_out}'


def _tails(difference: RunDifference) -> str:
    if not difference.tails:
        return ""
    drawn = []
    for name, tail in difference.tails.items():
        steps = [WaterfallStep(TAIL_LABELS[part], seconds, _COLOURS[part]) for part, seconds in tail.parts.items()]
        drawn.append(
            waterfall_figure(
                Waterfall(LATENCY_NAMES[name], tail.base.seconds, tail.run.seconds, steps, _tail_note(tail))
            )
        )
    hint = (
        "A P99 is made of what the intervals around it are made of: the nearest 1% of all, 20 at least. "
        "Behind others: stages computed other micro-batches. Compute: of the micro-batch with the request."
    )
    pictures = f'<div class="figures">{"".join(drawn)}</div>'
    tables = "".join(_tail_stages(difference, name) for name in difference.tails)
    return f'<section><h2>The tails</h2><p class="hint">{hint}</p>{pictures}{tables}</section>\n\n'


def _tail_stages(difference: RunDifference, latency: Latency) -> str:
    """Render what each stage has of the change of a P99; empty where there is one stage, or stages are not the same."""
    shown, tail = _shown_stages(difference), difference.tails[latency]
    if not shown:
        return ""
    names = difference.makespan.stage_names[1]
    heads = [f"{LATENCY_NAMES[latency]}, by stage", "change", *(html.escape(names[stage]) for stage in shown)]
    rows = (
        row(TAIL_LABELS[part], map(signed_text, (tail.parts[part], *(tail.by_stage[stage][part] for stage in shown))))
        for part in tail.by_stage[0]
    )
    return f'<div class="scroll">{table(heads, rows)}</div>'


def _tail_note(tail: TailDifference) -> str:
    texts = [
        f"{name}: {each.intervals:,} intervals, of {tail_requests(each)}; their micro-batches held "
        f"{each.prefill:,.0f} prompt tokens and {each.decodes:,.0f} decodes in the mean{_prompts(each)}"
        for name, each in ((BASE, tail.base), (RUN, tail.run))
    ]
    return ". ".join(texts) + "."


def _prompts(tail: Tail, most: int = 3) -> str:
    named = ", ".join(f"{request} ({count / tail.intervals:.0%})" for request, count in tail.prompts[:most])
    return f", the prompts of {named}{' and others' if len(tail.prompts) > most else ''}" if named else ""


def _changed(difference: RunDifference) -> str:
    if not difference.changed:
        return '<p class="none">No setting and no version differs.</p>'
    rows = (row(html.escape(each.name), map(html.escape, (each.base, each.run))) for each in difference.changed)
    return f'<div class="scroll">{table(("", BASE, RUN), rows, "changed")}</div>'


def _parts_table(rows: Sequence[PartRow], stages: Sequence[int], names: Sequence[str], base: float, run: float) -> str:
    lines = []
    for part in rows:
        seconds = ["" if v is None else seconds_text(v) for v in (part.base, part.run)]
        changes = [signed_text(change) for change in (part.change, *(part.by_stage[stage] for stage in stages))]
        lines.append(row(html.escape(part.label), [*seconds, *changes], "member" if part.base is None else ""))
    changes = [signed_text(run - base)] * (1 + len(stages))
    lines.append(row("makespan", [seconds_text(base), seconds_text(run), *changes], "total"))
    heads = map(html.escape, ("", BASE, RUN, "change", *(names[s] for s in stages)))
    return f'<div class="scroll">{table(heads, lines)}</div>'


def _requests(difference: RunDifference) -> str:
    rows = [
        row(html.escape(each.name), [each.tokens, signed_text(each.change), html.escape(each.most)])
        for each in request_rows(difference.requests, 15)
    ]
    rows.append(row("makespan", ["", signed_text(difference.makespan.change), ""], "total"))
    return f'<div class="scroll">{table(("", "prompt + output tokens", "change", "most of it"), rows)}</div>'


def _drawn(difference: RunDifference) -> tuple[DrawnRuns, list[dict[str, str]]]:
    """Return what is drawn of both runs, and what the timeline writes beside each. Of a fleet it has replica 0."""
    fleets = list(zip((BASE, RUN), difference.fleets, strict=True))
    heads = []
    for place, (name, fleet) in enumerate(fleets):
        replica = f" · {fleet.replica_name(0)} of {len(fleet.records)}" if len(fleet.records) > 1 else ""
        note = f"{seconds_text(fleet.span_seconds)}{replica}"
        heads.append({"label": name, "note": note, "colour": series_colour(place)})
    seconds = max(difference.makespan.base, difference.makespan.run)
    return DrawnRuns.of(fleets, len(fleets), seconds), heads
