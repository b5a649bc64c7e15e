"""Main numbers and tables of one run that its page shares with the terminal or a notebook."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...core.numbers import ms_text, percent_text, seconds_text
from ..drawing.text_table import TextTable
from ..explain.cause_words import causes_listed
from ..explain.sized_cause import SizedCause


def main_numbers(summary: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield the main numbers of a run: the name of each, its value with the unit, and a note."""
    duration, has_requests = summary["duration"], "requests" not in summary.get("unknown", ())
    if has_requests:
        total = f"{summary['total_token_throughput']:,.0f} with prompts"
        yield "Output", f"{summary['output_throughput']:,.1f} tok/s", total
        for name, key in (("TTFT", "ttft"), ("TBT", "itl")):
            yield f"{name} p50", ms_text(summary[f"median_{key}_ms"]), f"p99 {ms_text(summary[f'p99_{key}_ms'])}"
    else:
        count = summary["micro_batches"]
        yield "Micro-batches", f"{count:,}", f"{count / (duration or 1.0):,.1f} a second"
        if (tokens := summary.get("mean_tokens_per_micro_batch")) is not None:
            rate = tokens * count / (duration or 1.0)
            yield "Tokens computed", f"{rate:,.0f} tok/s", f"{tokens:,.1f} a micro-batch, with prompts"
    if "bubble_fraction" in summary:
        idle, seconds = summary["bubble_fraction"], summary["bubble_seconds"]
        unknown = idle * seconds.get("unknown", 0.0) / (sum(seconds.values()) or 1.0)
        note = f"bubbles {percent_text(summary['bubble_fraction_inner'])}"
        yield "Idle", percent_text(idle), note + (f", unknown {percent_text(unknown)}" if unknown else "")
    if has_requests:
        failed = f"{summary['failed']} failed" if summary["failed"] else "none failed"
        failed += f", {summary['preemptions']} preempted" if "preemptions" in summary else ""
        goodput = summary.get("request_goodput")
        yield (
            "Requests",
            f"{summary['completed']:,} done",
            failed if goodput is None else f"{goodput:.2f} req/s met the SLO",
        )
        kv = summary.get("peak_kv_fraction")
        yield "Duration", seconds_text(duration), "" if kv is None else f"KV peak {percent_text(kv)}"
    else:
        yield "Duration", seconds_text(duration), f"{summary['depth']} in flight at most"
    if drafts := summary.get("draft_tokens"):
        accepted = f"{summary['accepted_tokens']:,} of {drafts:,} accepted"
        yield "Drafts", f"{summary['accepted_tokens_per_decode']:.2f} a decode", accepted


def causes_table(causes: Sequence[SizedCause]) -> TextTable:
    """Build the table of causes worth fixing: the cost of each, its interval, and the change that fixes it."""
    heads, rows = causes_listed(causes)
    return TextTable(heads, rows, "Causes", ("cause", "change"))


def latency_table(summary: Mapping[str, Any]) -> TextTable:
    """Build the table of TTFT, TBT, TPOT, end-to-end latency and KV transfers, if any: mean, p50, p90, p99."""
    names = {"ttft": "TTFT", "itl": "TBT", "tpot": "TPOT", "e2el": "end to end"}
    names |= {"kv_wait": "KV waits", "kv_transfer": "KV transfer"} if "mean_kv_wait_ms" in summary else {}
    rows = []
    for key, name in names.items():
        values = (summary.get(f"{statistic}_{key}_ms") for statistic in ("mean", "median", "p90", "p99"))
        rows.append((name, *(ms_text(value or (0.0 if key.startswith("kv") else None)) for value in values)))
    return TextTable(("", "mean", "p50", "p90", "p99"), rows, "Latency")
