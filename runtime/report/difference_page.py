"""`diff.html`: the difference of two runs in words, as waterfalls and tables, with both pipelines on one time axis."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence

from ..ledger.causes import Cause
from ..ledger.difference import SPEED, STAGES, WORK
from ..ledger.tail_difference import Latency, Tail, TailDifference
from .chart import series_colour
from .chart_data import fleet_chart_data
from .comparison_page import DrawnRuns, charts_of_drawn
from .difference_terminal import Row, makespan_rows, ranked_stages, request_rows, tail_requests
from .difference_words import LATENCY_NAMES, TAIL_LABELS, paragraphs, part_label, signed_text
from .formatting import css_name, seconds_text
from .page_parts import error_notes, notes_list, template, whole_page
from .run_difference import BASE, RUN, RunDifference
from .svg import figures
from .timeline_block import timeline_scripts, timeline_section
from .timeline_columns import MAX_BOXES, pack_columns, tick_seconds
from .timeline_png import timeline_window
from .waterfall import Step, Waterfall, ends, waterfall_figure

MAX_STAGES = 8  # that have a waterfall each
_MAX_NAMED = 2  # changed settings in the title
_COLOURS = {
    WORK: "chunk", SPEED: "decode", STAGES: "s3", "queue": "queue", "no_room": "starved-kv-full",
    "turn": "starved-in-flight", "kv_transfer": "s5", "recovery": "recovery", "control": "control", "result": "s3",
    "unknown": "s7", "wait": "pb1-prefill-size", "transport": "transport", "compute": "busy",
}  # fmt: skip


def render_difference(difference: RunDifference) -> str:
    """Render the page."""
    found = difference.makespan
    changed, (first, *rest), tails = (list(map(html.escape, texts)) for texts in paragraphs(difference))
    drawn, heads = _drawn(difference)
    seconds = {cause: sum(run.cause_seconds[cause] for run in drawn.runs.values()) for cause in Cause}
    return whole_page(
        template("difference_page.html"),
        {
            "title": html.escape(_title(difference)),
            "subtitle": html.escape(" · ".join(
                f"{name}: {folder.title} ({folder.path})"
                for name, folder in zip((BASE, RUN), difference.folders, strict=True)
            )),
            "notes": notes_list(error_notes(folder.summary for folder in difference.folders)),
            "words": f"<p><b>{first}</b></p>" + "".join(f"<p>{' '.join(p)}</p>" for p in (changed, rest, tails) if p),
            "changed": _changed(difference),
            "makespan": _waterfalls(difference),
            "parts": _parts_table(makespan_rows(found), _shown_stages(difference), found.stage_names[1], found.base,
                                  found.run),
            "tails": _tails(difference),
            "requests_hint": _REQUESTS_HINT,
            "requests": _requests(difference),
            "timeline": timeline_section("Both pipelines over time", seconds, "Both on one time axis."),
            "charts": figures(charts_of_drawn(drawn)),
            "scripts": timeline_scripts(drawn.tick, drawn.columns, heads),
        },
        "\n.changed td:nth-child(n+2), .changed th:nth-child(n+2) { text-align: left; white-space: normal; }\n",
    )  # fmt: skip


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
    steps = [Step(part_label(part), seconds, _colour(part)) for part, seconds in parts.items()]
    return Waterfall(title, base, run, steps)


def _colour(part: str) -> str:
    return _COLOURS[part] if part in _COLOURS and part not in ("transport", "control") else css_name(Cause(part))


def _shown_stages(difference: RunDifference) -> list[int]:
    """The stages that have a column and a picture."""
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
        steps = [Step(TAIL_LABELS[part], seconds, _COLOURS[part]) for part, seconds in tail.parts.items()]
        drawn.append(waterfall_figure(
            Waterfall(LATENCY_NAMES[name], tail.base.seconds, tail.run.seconds, steps, _tail_note(tail))
        ))  # fmt: skip
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
    heads = "".join(f"<th>{html.escape(names[stage])}</th>" for stage in shown)
    rows = "".join(
        f"<tr><th>{TAIL_LABELS[part]}</th><td>{signed_text(tail.parts[part])}</td>"
        f"{''.join(f'<td>{signed_text(tail.by_stage[stage][part])}</td>' for stage in shown)}</tr>"
        for part in tail.by_stage[0]
    )
    head = f"<thead><tr><th>{LATENCY_NAMES[latency]}, by stage</th><th>change</th>{heads}</tr></thead>"
    return f'<div class="scroll"><table>{head}<tbody>{rows}</tbody></table></div>'


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
    rows = "".join(
        f"<tr><th>{html.escape(each.name)}</th><td>{html.escape(each.base)}</td><td>{html.escape(each.run)}</td></tr>"
        for each in difference.changed
    )
    head = f"<thead><tr><th></th><th>{BASE}</th><th>{RUN}</th></tr></thead>"
    return f'<div class="scroll"><table class="changed">{head}<tbody>{rows}</tbody></table></div>'


def _parts_table(rows: Sequence[Row], stages: Sequence[int], names: Sequence[str], base: float, run: float) -> str:
    def cells() -> Iterator[str]:
        for row in rows:
            is_part = row.base is None
            seconds = "".join(f"<td>{'' if v is None else seconds_text(v)}</td>" for v in (row.base, row.run))
            on_stages = "".join(f"<td>{signed_text(row.by_stage[stage])}</td>" for stage in stages)
            css = ' class="member"' if is_part else ""
            yield (
                f"<tr{css}><th>{html.escape(row.label)}</th>{seconds}<td>{signed_text(row.change)}</td>{on_stages}</tr>"
            )
        change = signed_text(run - base)
        last = f"<td>{change}</td>" * (1 + len(stages))
        yield f'<tr class="total"><th>makespan</th><td>{seconds_text(base)}</td><td>{seconds_text(run)}</td>{last}</tr>'

    heads = "".join(f"<th>{html.escape(name)}</th>" for name in (BASE, RUN, "change", *(names[s] for s in stages)))
    return (
        f'<div class="scroll"><table><thead><tr><th></th>{heads}</tr></thead><tbody>{"".join(cells())}</tbody></table>'
        "</div>"
    )


def _requests(difference: RunDifference) -> str:
    rows = "".join(
        f"<tr><th>{html.escape(row.name)}</th><td>{row.tokens}</td><td>{signed_text(row.change)}</td>"
        f"<td>{html.escape(row.most)}</td></tr>"
        for row in request_rows(difference.requests, 15)
    )
    change = signed_text(difference.makespan.change)
    total = f'<tr class="total"><th>makespan</th><td></td><td>{change}</td><td></td></tr>'
    head = "<thead><tr><th></th><th>prompt + output tokens</th><th>change</th><th>most of it</th></tr></thead>"
    return f'<div class="scroll"><table>{head}<tbody>{rows}{total}</tbody></table></div>'


def _drawn(difference: RunDifference) -> tuple[DrawnRuns, list[dict[str, str]]]:
    """What is drawn of both runs, and what the timeline writes beside each. Of a fleet it has replica 0."""
    span = max(difference.makespan.base, difference.makespan.run)
    tick = tick_seconds(1.001 * span)
    runs, columns, windows, heads = {}, [], {}, []
    for place, (name, fleet) in enumerate(zip((BASE, RUN), difference.fleets, strict=True)):
        runs[name] = fleet_chart_data(fleet)
        columns.append(pack_columns(fleet.records[0], fleet.ledgers[0], tick, MAX_BOXES // 2))
        windows[name] = timeline_window(fleet.ledgers[0])
        replica = f" · {fleet.replica_name(0)} of {len(fleet.records)}" if len(fleet.records) > 1 else ""
        note = f"{seconds_text(fleet.span_seconds)}{replica}"
        heads.append({"label": name, "note": note, "colour": series_colour(place)})
    return DrawnRuns(tick, runs, columns, windows), heads
