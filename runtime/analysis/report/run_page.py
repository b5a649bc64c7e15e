"""`report.html` of one run: a self-contained page that opens offline."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from ...core.numbers import counted, ms_text, percent_text, seconds_text
from ...core.run_record import RunRecord
from ..drawing.chart_data import ChartData
from ..drawing.formatting import cause_label, css_name
from ..drawing.page_parts import (
    HATCHES,
    IDLE_WORDS,
    cards,
    error_notes,
    notes_list,
    pairs_table,
    section,
    template,
    whole_page,
    words_section,
)
from ..drawing.svg import figures
from ..drawing.text_table import TextTable
from ..drawing.timeline_block import timeline_scripts, timeline_section
from ..drawing.timeline_columns import pack_columns, tick_seconds
from ..explain.analysed_run import AnalysedRun
from ..ledger.ledger import Ledger
from ..run_folder.requests_csv import request_row
from . import run_charts as charts
from .blame_section import blame_section
from .faults_section import faults_section, stragglers_section
from .idle_table import idle_section
from .moments_section import moments_section
from .run_tables import causes_table, latency_table, main_numbers

MAX_REQUEST_ROWS = 200


def render_report(run: AnalysedRun) -> str:
    """Render the page of a standalone run."""
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
            "words": words_section(run.words) + (causes_table(run.causes).html() if run.causes else ""),
            "cards": cards((name, *value.partition(" ")[::2], note) for name, value, note in main_numbers(summary)),
            "idle_words": IDLE_WORDS,
            "timeline": timeline_section("The pipeline over time", ledger.seconds_by_cause()),
            "bubbles": idle_section(run.fleet, run.causes),
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


def _stage_bars(ledger: Ledger) -> str:
    """Render one bar per stage: compute time first, then idle time by cause."""
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
    """Render the section on the share of the machine's rates that compute reaches; empty if rates are unknown."""
    rows = [
        (
            f"stage {share['stage']}, {share['phase']}",
            seconds_text(share["seconds"]),
            percent_text(share["mfu"]),
            percent_text(share["bandwidth_share"]),
            f"{share['gemm_tflops']:,.3g} TFLOP/s",
            f"{share['memory_gigabytes_per_s']:,.3g} GB/s",
        )
        for share in shares
    ]
    heads = ("", "compute", "MFU", "bandwidth share", "GEMM rate", "memory bandwidth")
    hint = (
        "FLOPs and bytes that micro-batches need, over what the stage's ranks would give in the same time. A phase "
        "near neither rate leaves the machine unused."
    )
    return section("MFU and bandwidth share", TextTable(heads, rows).html("narrow") if rows else "", hint)


def _predictions(run: ChartData) -> str:
    """Render the section on predicted times; empty if the scheduler made no predictions."""
    chart = charts.predictions(run)
    hint = "|predicted / measured - 1| of a micro-batch's time on a stage, as the scheduler foresaw it at dispatch."
    return "" if chart.is_empty else section("How well times were predicted", figures([chart]), hint)


def _of_requests(run: AnalysedRun) -> str:
    """Render the sections on latencies and requests."""
    latencies = latency_table(run.summary).html("narrow") + figures(charts.latency_histograms(run.charts))
    requests = f'<div class="tall">{_requests(run.record, run.ledger).html()}</div>'
    return section("Latency", latencies) + section("Requests", requests, _requests_note(run.record))


def _requests(record: RunRecord, ledger: Ledger) -> TextTable:
    """Build the table of the first requests."""
    rows = []
    for request in record.requests[:MAX_REQUEST_ROWS]:
        values = request_row(request, ledger.t0, ledger.bubble_of_request(request.request))
        rows.append([_cell(name, value) for name, value in values.items()])
    heads = (
        *("request", "prompt", "output", "arrival", "TTFT", "mean TBT", "max TBT", "end to end", "bubble time"),
        *("preempted", "cached", "finish", "user"),
    )
    return TextTable(heads, rows)


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
