"""`report.html` of one run: a page that needs no other file and opens offline."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import yaml

from ..core.numbers import counted
from ..core.run_record import RunRecord
from ..drawing.chart_data import ChartData
from ..drawing.formatting import cause_label, css_name, ms_text, percent_text, seconds_text
from ..drawing.page_parts import (
    HATCHES,
    IDLE_WORDS,
    error_notes,
    idle_swatch,
    notes_list,
    pairs_table,
    row,
    swatch,
    table,
    template,
    whole_page,
    words_section,
)
from ..drawing.svg import figures
from ..drawing.timeline_block import timeline_scripts, timeline_section
from ..drawing.timeline_columns import pack_columns, tick_seconds
from ..explain.analysed_run import AnalysedRun
from ..explain.cause_words import cause_name, causes_listed, part_text
from ..explain.sized_cause import COMPUTE, SizedCause, parts
from ..ledger.causes import BUBBLES, STARVED, Cause
from ..ledger.ledger import Ledger
from ..ledger.predictions import prediction_error
from ..run_folder.requests_csv import request_row
from . import run_charts as charts
from .blame_section import blame_section
from .faults_section import faults_section, stragglers_section
from .moments_section import moments_section

MAX_REQUEST_ROWS = 200


def render_report(run: AnalysedRun) -> str:
    """Render the page of a run that stands alone."""
    record, ledger, summary = run.record, run.ledger, run.summary
    tick = tick_seconds(ledger.span_seconds)
    columns = pack_columns(record, ledger, tick)
    title = str(summary.get("title", "gapless"))
    return whole_page(
        template("run_page.html", __package__),
        {
            "title": html.escape(title),
            "subtitle": html.escape(_subtitle(record, summary)),
            "notes": notes_list([*record.notes, *error_notes([summary])]),
            "words": words_section(run.words) + _causes(run.causes),
            "cards": _cards(summary),
            "idle_words": IDLE_WORDS,
            "timeline": timeline_section("The pipeline over time", ledger.seconds_by_cause()),
            "bubbles": _bubble_table(ledger, run.causes),
            "stages": _stage_bars(ledger),
            "compute": _compute(summary.get("compute", ())),
            "moments": moments_section(run, columns.end * tick) if run.knows_requests else "",
            "blame": blame_section(record, run.blame) if run.knows_requests else "",
            "faults": faults_section(summary.get("faults", [])) + stragglers_section(summary),
            "charts_of": "Requests and micro-batches" if run.knows_requests else "Micro-batches",
            "charts": figures(charts.charts_of_micro_batches(run.charts)),
            "predictions": _predictions(run.charts),
            "of_requests": _of_requests(run) if run.knows_requests else "",
            "config": html.escape(yaml.safe_dump(summary.get("config") or {}, sort_keys=False, allow_unicode=True)),
            "versions": pairs_table(summary.get("versions") or {}),
            "scripts": timeline_scripts(tick, [columns]),
        },
    )


def _subtitle(record: RunRecord, summary: Mapping[str, Any]) -> str:
    parts = [counted(record.num_stages, "stage"), counted(len(record.micro_batches), "micro-batch")]
    parts += [] if "requests" in record.unknown else [counted(len(record.requests) + len(record.crossing), "request")]
    return " · ".join([*parts, str(summary.get("date", ""))]).rstrip(" ·")


def _cards(summary: Mapping[str, Any]) -> str:
    """Render the main numbers as cards: a name, a value with its unit, and a note."""
    if "requests" in summary.get("unknown", ()):
        return _card_rows(_cards_of_trace(summary))
    failed = f"{summary['failed']} failed" if summary["failed"] else "none failed"
    cards = [
        (
            "Output",
            f"{summary['output_throughput']:,.1f}",
            "tok/s",
            f"{summary['total_token_throughput']:,.0f} with prompts",
        ),
        ("TTFT p50", *ms_text(summary["median_ttft_ms"]).split(), f"p99 {ms_text(summary['p99_ttft_ms'])}"),
        ("TBT p50", *ms_text(summary["median_itl_ms"]).split(), f"p99 {ms_text(summary['p99_itl_ms'])}"),
        (
            "Requests",
            f"{summary['completed']:,}",
            "done",
            _goodput(summary)
            or (f"{failed}, {summary['preemptions']} preempted" if "preemptions" in summary else failed),
        ),
        (
            "Duration",
            *_value_and_unit(seconds_text(summary["duration"])),
            f"KV peak {percent_text(summary['peak_kv_fraction'])}" if "peak_kv_fraction" in summary else "",
        ),
    ]
    if "bubble_fraction" in summary:
        inner = f"bubbles {percent_text(summary['bubble_fraction_inner'])}"
        cards.insert(3, ("Idle", f"{summary['bubble_fraction'] * 100:.1f}", "%", inner))
    if drafts := summary.get("draft_tokens"):
        accepted = f"{summary['accepted_tokens']:,} of {drafts:,} accepted"
        cards.append(("Drafts", f"{summary['accepted_tokens_per_decode']:.2f}", "a decode", accepted))
    return _card_rows(cards)


def _cards_of_trace(summary: Mapping[str, Any]) -> Iterable[tuple[str, ...]]:
    """Make the cards of a run whose trace says nothing of its requests."""
    count = summary["micro_batches"]
    yield ("Micro-batches", f"{count:,}", "", f"{count / (summary['duration'] or 1.0):,.1f} a second")
    if (tokens := summary.get("mean_tokens_per_micro_batch")) is not None:
        rate = tokens * count / (summary["duration"] or 1.0)
        yield ("Tokens computed", f"{rate:,.0f}", "tok/s", f"{tokens:,.1f} a micro-batch, with prompts")
    inner, unknown = summary["bubble_fraction_inner"], summary["bubble_seconds"]["unknown"]
    stage_seconds = sum(summary["bubble_seconds"].values()) / (summary["bubble_fraction"] or 1.0)
    yield (
        "Idle",
        f"{summary['bubble_fraction'] * 100:.1f}",
        "%",
        f"bubbles {percent_text(inner)}, unknown {percent_text(unknown / (stage_seconds or 1.0))}",
    )
    yield ("Duration", *_value_and_unit(seconds_text(summary["duration"])), f"{summary['depth']} in flight at most")


def _card_rows(cards: Iterable[tuple[str, ...]]) -> str:
    return "\n".join(
        f'<div class="card"><h3>{name}</h3><p class="value">{value} <small>{unit}</small></p><p>{note}</p></div>'
        for name, value, unit, note in cards
    )


def _goodput(summary: Mapping[str, Any]) -> str:
    if "request_goodput" not in summary:
        return ""
    return f"{summary['request_goodput']:.2f} req/s met the SLO"


def _value_and_unit(text: str) -> tuple[str, str]:
    value, _, unit = text.partition(" ")
    return value, unit


def _causes(causes: Sequence[SizedCause]) -> str:
    """Render what is worth mending: what each cause costs, its range, and the change that undoes it."""
    if not causes:
        return ""
    heads, rows = causes_listed(causes)
    lines = [row(name, cells) for name, *cells in (map(html.escape, each) for each in rows)]
    return f'<div class="scroll" id="causes">{table(heads, lines)}</div>\n'


def _bubble_table(ledger: Ledger, causes: Sequence[SizedCause] = ()) -> str:
    """Render idle time by cause: seconds, share of all stage time, and seconds of each stage, with subtotals.

    Below each cause, and below compute, is what of it comes from each of the run's root causes.
    """
    stages = range(ledger.num_stages)
    total = ledger.seconds_by_cause()
    by_stage = [ledger.seconds_by_cause(stage) for stage in stages]
    whole = ledger.stage_seconds or 1.0
    idle_seconds = sum(total.values())

    def line(head: str, values: Iterable[float], seconds: float, meaning: str, css: str = "") -> str:
        cells = "".join(f'<td class="{"" if value > 0 else "zero"}">{seconds_text(value)}</td>' for value in values)
        bar = f'<b style="width:{72 * seconds / (idle_seconds or 1.0):.1f}px"></b>'
        cells = f'<td>{seconds_text(seconds)}</td><td class="share">{bar}{percent_text(seconds / whole)}</td>{cells}'
        return f'<tr class="{css}"><th>{head}<small>{meaning}</small></th>{cells}</tr>'

    def roots(shown: str) -> Iterator[str]:
        for each, part in parts(causes, shown, whole):
            cells = f'<td>{part_text(part)}</td><td class="share">{percent_text(part / whole)}</td>'
            head = f"of which {html.escape(cause_name(each))}"
            yield f'<tr class="root"><th>{head}</th>{cells}{"<td></td>" * len(stages)}</tr>'

    rows = []
    groups = [
        (
            "bubbles",
            BUBBLES,
            "Idle time without starved, unknown, recovery, fill and drain: work was there, the stage waited for it.",
        ),
        ("starved", STARVED, "No admissible work existed."),
        ("", (Cause.UNKNOWN,) if total[Cause.UNKNOWN] else (), ""),
        ("", (Cause.RECOVERY,) if total[Cause.RECOVERY] else (), ""),
        ("", (Cause.FILL_DRAIN,), ""),
    ]
    for name, group, meaning in groups:
        if name:
            values = [sum(seconds[cause] for cause in group) for seconds in by_stage]
            rows.append(line(name, values, sum(total[cause] for cause in group), meaning, "group"))
        for cause in group:
            head = idle_swatch(cause) + html.escape(cause_label(cause))
            values = [seconds[cause] for seconds in by_stage]
            rows.append(line(head, values, total[cause], html.escape(cause.meaning), "member" if name else ""))
            rows += roots(cause)
    idle = [sum(seconds.values()) for seconds in by_stage]
    rows.append(line("idle", idle, sum(idle), "With the compute time, exactly the run's span on every stage.", "total"))
    if causes:
        busy = [ledger.busy_seconds(stage) for stage in stages]
        rows.append(line(swatch("busy") + "compute", busy, sum(busy), "", "total"))
        rows += roots(COMPUTE)
    heads = ["cause", "stage-seconds", "of stage time", *(f"stage {stage}" for stage in stages)]
    return table(heads, rows, "bubbles")


def _stage_bars(ledger: Ledger) -> str:
    """Render a bar for each stage: compute time first, then idle time by cause."""
    span = ledger.span_seconds or 1.0
    rows = []
    for stage in range(ledger.num_stages):
        busy = ledger.busy_seconds(stage)
        parts = [("busy", "", "compute", busy)]
        parts += [
            (css_name(cause), HATCHES[cause], cause_label(cause), s)
            for cause, s in ledger.seconds_by_cause(stage).items()
            if s > 0
        ]
        bar = "".join(
            f'<i class="{hatch}" style="width:{100 * s / span:.3f}%;background-color:var(--{css})" '
            f'title="{html.escape(text)}: {seconds_text(s)} ({percent_text(s / span)})"></i>'
            for css, hatch, text, s in parts
        )
        rows.append(
            f'<div class="stage"><span>stage {stage}</span><div class="bar">{bar}</div>'
            f"<span>{percent_text(busy / span)} busy</span></div>"
        )
    return "\n".join(rows)


def _compute(shares: Iterable[Mapping[str, Any]]) -> str:
    """Render the section on what compute reaches of the machine's rates; empty where these are not known."""
    rows = [
        row(
            f"stage {share['stage']}, {share['phase']}",
            [
                seconds_text(share["seconds"]),
                percent_text(share["mfu"]),
                percent_text(share["bandwidth_share"]),
                f"{share['gemm_tflops']:,.3g} TFLOP/s",
                f"{share['memory_gigabytes_per_s']:,.3g} GB/s",
            ],
        )
        for share in shares
    ]
    if not rows:
        return ""
    heads = ("", "compute", "MFU", "bandwidth share", "GEMM rate", "memory bandwidth")
    return (
        '<section>\n  <h2>Compute beside its machine</h2>\n  <p class="hint">FLOPs and bytes that micro-batches need, '
        "over what the stage's ranks would give in the same time. A phase near neither rate leaves the machine "
        f'unused.</p>\n  <div class="scroll">{table(heads, rows, "narrow")}</div>\n</section>\n\n'
    )


def _latency_table(summary: Mapping[str, Any]) -> str:
    """Render the statistics of each latency as a table."""
    statistics = {"mean": "mean", "median": "p50", "p90": "p90", "p99": "p99"}
    rows = (
        row(latency.title, [ms_text(summary.get(f"{statistic}_{key}_ms") or None) for statistic in statistics])
        for key, latency in charts.LATENCIES.items()
    )
    return f'<div class="scroll">{table(["", *statistics.values()], rows, "narrow")}</div>'


def _predictions(run: ChartData) -> str:
    """Render the section on predicted times; empty if the scheduler predicted none."""
    total = prediction_error(run.predictions)
    if total is None:
        return ""
    rows = [(f"stage {stage}", prediction_error([pair]), len(pair[1])) for stage, pair in enumerate(run.predictions)]
    rows.append(("all", total, sum(len(pair[1]) for pair in run.predictions)))
    lines = [
        row(name, [f"{count:,}", percent_text(error["median"]), percent_text(error["p90"])])
        for name, error, count in rows
        if error is not None
    ]
    return (
        '<section>\n  <h2>How well times were predicted</h2>\n  <p class="hint">|predicted / measured - 1| of a '
        "micro-batch's time on a stage, as the scheduler foresaw it at dispatch.</p>\n"
        f'  <div class="beside">{figures([charts.predictions(run)])}<div class="scroll">'
        f"{table(('', 'micro-batches', 'p50', 'p90'), lines)}</div></div>\n</section>"
    )


def _of_requests(run: AnalysedRun) -> str:
    """Render the sections on latencies and requests."""
    latencies = _latency_table(run.summary) + figures(charts.latency_histograms(run.charts))
    return (
        f"<section>\n  <h2>Latency</h2>\n{latencies}\n</section>\n\n<section>\n  <h2>Requests</h2>\n"
        f'  <p class="hint">{_requests_note(run.record)}</p>\n  <div class="scroll tall">\n'
        f"{_requests(run.record, run.ledger)}\n  </div>\n</section>"
    )


def _requests(record: RunRecord, ledger: Ledger) -> str:
    """Render the first requests as a table."""
    rows = []
    for request in record.requests[:MAX_REQUEST_ROWS]:
        values = request_row(request, ledger.t0, ledger.bubble_of_request(request.request))
        cells = "".join(f"<td>{html.escape(_cell(name, value))}</td>" for name, value in values.items())
        rows.append(f"<tr>{cells}</tr>")
    heads = (
        *("request", "prompt", "output", "arrival", "TTFT", "mean TBT", "max TBT", "end to end", "bubble time"),
        *("preempted", "cached", "finish", "user"),
    )
    return table(heads, rows)


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name.endswith("_ms"):
        return ms_text(value)
    return f"{value:.3f} s" if name == "arrival_s" else str(value)


def _requests_note(record: RunRecord) -> str:
    count = len(record.requests)
    if count > MAX_REQUEST_ROWS:
        return f"The first {MAX_REQUEST_ROWS} of {count:,}; requests.csv has them all."
    return "Bubble time of a request: idle time right before its micro-batches, summed over them and the stages."
