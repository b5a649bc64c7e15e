"""`report.html`: one run on one page that needs nothing from outside and opens offline."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import Any

import numpy as np
import yaml

from ..ledger import CAUSES, PIPELINE_BUBBLES, STARVED, Cause, Floats, Ledger
from ..spans import RunRecord
from ..summary import completed_requests, latencies, request_row
from .columns import pack
from .text import css_name, label, milliseconds, percent, seconds_text

REQUEST_ROWS = 200
BINS = 48


def render_report(record: RunRecord, ledger: Ledger, summary: Mapping[str, Any]) -> str:
    """The page of a run, from the record, its ledger, and what `summary.json` holds."""
    columns = pack(record, ledger)
    causes = [{"name": label(cause), "css": css_name(cause), "meaning": cause.meaning} for cause in CAUSES]
    title = str(summary.get("title", "gapless"))
    return fill(
        template("report.html"),
        {
            "style": template("report.css"),
            "script": template("report.js"),
            "title": html.escape(title),
            "subtitle": html.escape(_subtitle(record, summary)),
            "cards": _cards(summary),
            "legend": _legend(ledger),
            "bubbles": _bubble_table(ledger),
            "stages": _stage_bars(ledger),
            "latencies": _latencies(record),
            "requests": _requests(record, ledger),
            "requests_note": _requests_note(record),
            "config": html.escape(yaml.safe_dump(summary.get("config") or {}, sort_keys=False, allow_unicode=True)),
            "versions": _pairs(summary.get("versions") or {}),
            "head": script_json({**columns.head, "causes": causes}),
            "columns": columns.data,
        },
    )


def template(name: str) -> str:
    """A template file of this package."""
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def fill(text: str, values: Mapping[str, str]) -> str:
    """Replace each `{{name}}` once; what is filled in is not looked at again."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], text)


def script_json(value: Any) -> str:
    """JSON that may stand inside a script element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _subtitle(record: RunRecord, summary: Mapping[str, Any]) -> str:
    stages = f"{record.num_stages} stage{'' if record.num_stages == 1 else 's'}"
    parts = [stages, f"{len(record.steps):,} micro-batches", f"{len(record.requests):,} requests"]
    return " · ".join([*parts, str(summary.get("date", ""))]).rstrip(" ·")


def _cards(summary: Mapping[str, Any]) -> str:
    failed = f"{summary['failed']} failed" if summary["failed"] else "none failed"
    cards = [
        ("Output", f"{summary['output_throughput']:,.1f}", "tok/s",
         f"{summary['total_token_throughput']:,.0f} with prompts"),
        ("TTFT p50", *milliseconds(summary["median_ttft_ms"]).split(), f"p99 {milliseconds(summary['p99_ttft_ms'])}"),
        ("TBT p50", *milliseconds(summary["median_itl_ms"]).split(), f"p99 {milliseconds(summary['p99_itl_ms'])}"),
        ("Bubbles", f"{summary['bubble_fraction'] * 100:.1f}", "%",
         f"{percent(summary['bubble_fraction_inner'])} without starved and fill"),
        ("Requests", f"{summary['completed']:,}", "done", f"{failed}, {summary['preemptions']} preempted"),
        ("Duration", *_split(seconds_text(summary["duration"])), f"KV peak {percent(summary['peak_kv_fraction'])}"),
    ]  # fmt: skip
    return "\n".join(
        f'<div class="card"><h3>{name}</h3><p class="value">{value} <small>{unit}</small></p><p>{note}</p></div>'
        for name, value, unit, note in cards
    )


def _split(text: str) -> tuple[str, str]:
    value, _, unit = text.partition(" ")
    return value, unit


def _swatch(name: str) -> str:
    return f'<i class="swatch" style="background:var(--{name})"></i>'


def _legend(ledger: Ledger) -> str:
    seconds = ledger.seconds_by_cause()
    items = [("chunk", "chunk tokens", "Prompt tokens."), ("decode", "decode tokens", "One token of one request each.")]
    items += [(css_name(cause), label(cause), cause.meaning) for cause in CAUSES if seconds[cause] > 0]
    return "\n".join(f'<li title="{html.escape(title)}">{_swatch(css)}{text}</li>' for css, text, title in items)


def _bubble_table(ledger: Ledger) -> str:
    """Seconds and share by cause, and by stage; groups of causes subtotalled."""
    stages = range(ledger.num_stages)
    total = ledger.seconds_by_cause()
    by_stage = [ledger.seconds_by_cause(stage) for stage in stages]
    whole = ledger.stage_seconds or 1.0
    idle_seconds = sum(total.values())

    def row(head: str, values: Iterable[float], seconds: float, meaning: str, css: str = "") -> str:
        cells = "".join(f'<td class="{"" if value > 0 else "zero"}">{seconds_text(value)}</td>' for value in values)
        bar = f'<b style="width:{72 * seconds / (idle_seconds or 1.0):.1f}px"></b>'
        cells = f'<td>{seconds_text(seconds)}</td><td class="share">{bar}{percent(seconds / whole)}</td>{cells}'
        return f'<tr class="{css}"><th>{head}<small>{meaning}</small></th>{cells}</tr>'

    rows = []
    groups = [
        ("pipeline bubbles", PIPELINE_BUBBLES, "What more even micro-batches or stages would remove."),
        ("", (Cause.TRANSPORT,), ""),
        ("", (Cause.CONTROL,), ""),
        ("starved", STARVED, "No admissible work existed."),
        ("", (Cause.FILL_DRAIN,), ""),
    ]
    for name, group, meaning in groups:
        if name:
            values = [sum(seconds[cause] for cause in group) for seconds in by_stage]
            rows.append(row(name, values, sum(total[cause] for cause in group), meaning, "group"))
        for cause in group:
            head = _swatch(css_name(cause)) + html.escape(label(cause))
            values = [seconds[cause] for seconds in by_stage]
            rows.append(row(head, values, total[cause], html.escape(cause.meaning), "member" if name else ""))
    idle = [sum(seconds.values()) for seconds in by_stage]
    rows.append(
        row("all idle", idle, sum(idle), "With the compute time, exactly the run's span on every stage.", "total")
    )
    heads = "".join(f"<th>stage {stage}</th>" for stage in stages)
    return (
        f'<table class="bubbles"><thead><tr><th>cause</th><th>seconds</th><th>of stage time</th>{heads}'
        f"</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    )


def _stage_bars(ledger: Ledger) -> str:
    """A bar a stage: compute first, then its idle time by cause."""
    span = ledger.span_seconds or 1.0
    rows = []
    for stage in range(ledger.num_stages):
        busy = ledger.busy_seconds(stage)
        parts = [("busy", "compute", busy)]
        parts += [(css_name(cause), label(cause), s) for cause, s in ledger.seconds_by_cause(stage).items() if s > 0]
        bar = "".join(
            f'<i style="width:{100 * s / span:.3f}%;background:var(--{css})" title="{html.escape(text)}: '
            f'{seconds_text(s)} ({percent(s / span)})"></i>'
            for css, text, s in parts
        )
        rows.append(
            f'<div class="stage"><span>stage {stage}</span><div class="bar">{bar}</div>'
            f"<span>{percent(busy / span)} busy</span></div>"
        )
    return "\n".join(rows)


def _latencies(record: RunRecord) -> str:
    values = latencies(completed_requests(record))
    names = {"ttft": "TTFT: time to first token", "itl": "TBT: time between tokens", "e2el": "End to end"}
    return "\n".join(_histogram(names[name], values[name]) for name in names)


def _histogram(title: str, values: Floats) -> str:
    """A figure: p50, p90, p99, and the distribution as SVG; beyond 1.3 times the p99 in one last bin."""
    if not len(values):
        return f'<figure><figcaption>{title}</figcaption><p class="none">nothing measured</p></figure>'
    p50, p90, p99 = np.percentile(values, [50, 90, 99]).tolist()
    low, high = float(values.min()), float(min(values.max(), 1.3 * p99))
    low = 0.0 if low < 0.3 * high else low
    high = max(high, low + 1e-3)
    counts, _ = np.histogram(np.minimum(values, high), bins=BINS, range=(low, high))
    width, height, top = 480, 120, 18
    step = width / BINS
    scale = height / max(1, int(counts.max()))
    bars = "".join(
        f'<rect x="{i * step + 0.5:.1f}" y="{top + height - n * scale:.1f}" width="{step - 1:.1f}" '
        f'height="{n * scale:.1f}"><title>{milliseconds(low + (high - low) * i / BINS)} to '
        f"{milliseconds(low + (high - low) * (i + 1) / BINS)}: {n:,}</title></rect>"
        for i, n in enumerate(counts.tolist())
        if n
    )
    marks = ""
    for name, value in (("p50", p50), ("p90", p90), ("p99", p99)):
        x = min(width, max(0.0, (value - low) / (high - low) * width))
        marks += f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{top + height}"/>'
        if name != "p90" or (abs(p90 - p50) / (high - low) > 0.08 and abs(p99 - p90) / (high - low) > 0.08):
            marks += f'<text x="{x:.1f}" y="12" text-anchor="{"end" if x > width - 16 else "middle"}">{name}</text>'
    axis = "".join(
        f'<text x="{width * at:.0f}" y="{top + height + 16}" text-anchor="{anchor}">'
        f"{milliseconds(low + (high - low) * at)}</text>"
        for at, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end"))
    )
    numbers = " ".join(
        f"<span><b>{milliseconds(value)}</b> {name}</span>"
        for name, value in (("p50", p50), ("p90", p90), ("p99", p99))
    )
    return (
        f'<figure><figcaption>{title}</figcaption><p class="numbers">{numbers}</p>'
        f'<svg viewBox="0 0 {width} {top + height + 22}" role="img" aria-label="{title}, histogram of {len(values):,}">'
        f'<g class="bars">{bars}</g><g class="marks">{marks}</g><g class="axis">'
        f'<line x1="0" x2="{width}" y1="{top + height}" y2="{top + height}"/>{axis}</g></svg></figure>'
    )


def _requests(record: RunRecord, ledger: Ledger) -> str:
    rows = []
    for request in record.requests[:REQUEST_ROWS]:
        row = request_row(request, ledger)
        cells = "".join(f"<td>{html.escape(_cell(name, value))}</td>" for name, value in row.items())
        rows.append(f"<tr>{cells}</tr>")
    heads = (
        *("request", "prompt", "output", "arrival", "TTFT", "mean TBT", "max TBT", "end to end", "bubbles"),
        *("preempted", "finish"),
    )
    head = "".join(f"<th>{name}</th>" for name in heads)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name.endswith("_ms"):
        return milliseconds(value)
    return f"{value:.3f} s" if name == "arrival_s" else str(value)


def _requests_note(record: RunRecord) -> str:
    count = len(record.requests)
    if count > REQUEST_ROWS:
        return f"The first {REQUEST_ROWS} of {count:,}; requests.csv has them all."
    return "Bubbles: idle time right before the request's micro-batches, summed over them and the stages."


def _pairs(values: Mapping[str, Any]) -> str:
    rows = "".join(f"<tr><th>{html.escape(str(k))}</th><td>{html.escape(str(v))}</td></tr>" for k, v in values.items())
    return f"<table>{rows}</table>" if rows else '<p class="none">not recorded</p>'
