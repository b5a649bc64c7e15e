"""A run's tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from ..ledger import CAUSES, Ledger
from .page import label, milliseconds, percent, seconds_text

STAGE_COLUMNS = 8  # more do not fit a terminal


def bubble_table(ledger: Ledger, *, title: str | None = "Idle time") -> Table:
    """Idle seconds and their share of all stage-time by cause, then by stage; causes without any are left out."""
    stages = range(ledger.num_stages) if 1 < ledger.num_stages <= STAGE_COLUMNS else range(0)
    table = Table(title=title, title_justify="left", caption_justify="left")
    table.add_column("cause")
    for name in ("seconds", "of stage time", *(f"stage {stage}" for stage in stages)):
        table.add_column(name, justify="right")
    total = ledger.seconds_by_cause()
    by_stage = [ledger.seconds_by_cause(stage) for stage in stages]
    whole = ledger.stage_seconds or 1.0
    for cause in CAUSES:
        if total[cause] > 0:
            values = (seconds_text(seconds[cause]) for seconds in by_stage)
            table.add_row(label(cause), seconds_text(total[cause]), percent(total[cause] / whole), *values)
    table.add_section()
    idle, busy = sum(total.values()), ledger.busy_seconds()
    values = (seconds_text(sum(seconds.values())) for seconds in by_stage)
    table.add_row("all idle", seconds_text(idle), percent(idle / whole), *values, style="bold")
    values = (seconds_text(ledger.busy_seconds(stage)) for stage in stages)
    table.add_row("compute", seconds_text(busy), percent(busy / whole), *values)
    table.caption = f"bubbles without starved and fill: {percent(ledger.bubble_fraction_inner)}"
    return table


def latency_table(summary: Mapping[str, Any], *, title: str | None = "Latency") -> Table:
    """TTFT, TBT, TPOT and end to end: mean, p50, p90, p99."""
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for name in ("mean", "p50", "p90", "p99"):
        table.add_column(name, justify="right")
    names = {"ttft": "TTFT", "itl": "TBT", "tpot": "TPOT", "e2el": "end to end"}
    for key, name in names.items():
        values = (summary[f"{statistic}_{key}_ms"] for statistic in ("mean", "median", "p90", "p99"))
        table.add_row(name, *(milliseconds(value) for value in values))
    return table
