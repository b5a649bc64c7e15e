"""Blame: the requests and users that other requests waited for most."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from ...core.numbers import seconds_text
from ...core.request_record import RequestRecord
from ...core.run_record import RunRecord
from ..drawing.page_parts import section
from ..drawing.text_table import TextTable
from ..ledger.blame import Blame

_TITLE = "Who cost others time"
_COLUMNS = ("prompt", "output", "cost TTFT", "cost TBT", "lost")
_MOST_ROWS = 10
_HINT = (
    "What others lost to a request: its share of the compute of micro-batches that they were in with it, or waited for "
    '(docs/ledger.md#blame). "Lost" is what it lost to others itself. All that is charged is all that is lost.'
)


def request_name(request: RequestRecord) -> str:
    """Return a display name of a request, with its user if it has one."""
    return f"request {request.request}" + (f" of {request.user}" if request.user else "")


def blame_table(record: RunRecord, blame: Blame, most: int = _MOST_ROWS) -> TextTable | None:
    """Build the table of the requests that cost others most; None if none cost others anything."""
    rows, cost = [], blame.ttft.cost + blame.tbt.cost
    for place in np.argsort(-cost, kind="stable")[:most].tolist():
        if cost[place] <= 0:
            break
        request = record.requests[place]
        seconds = blame.ttft.cost[place], blame.tbt.cost[place], blame.ttft.lost[place] + blame.tbt.lost[place]
        sizes = f"{request.prompt_tokens:,}", f"{request.output_tokens:,}"
        rows.append((request_name(request), *sizes, *_seconds(*seconds)))
    return TextTable(("", *_COLUMNS), rows, _TITLE, optional=("prompt", "output", "lost")) if rows else None


def blame_section(record: RunRecord, blame: Blame) -> str:
    """Render the section; empty if no request cost others anything."""
    shown = blame_table(record, blame)
    if shown is None:
        return ""
    unrecorded = blame.ttft.unrecorded + blame.tbt.unrecorded
    note = f" Another {seconds_text(unrecorded)} were lost to requests that the record does not have."
    users = _users(record, blame)
    tables = shown.html() + (users.html() if len(users.rows) > 1 else "")
    return section(_TITLE, tables, _HINT + (note if unrecorded > 0 else ""), "blame")


def _users(record: RunRecord, blame: Blame) -> TextTable:
    """Build the table of users."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0] * 6)
    columns = (blame.ttft.cost, blame.tbt.cost, blame.ttft.lost + blame.tbt.lost)
    for place, request in enumerate(record.requests):
        added = (1, request.prompt_tokens, request.output_tokens, *(column[place] for column in columns))
        for at, value in enumerate(added):
            sums[request.user][at] += value
    rows = []
    for user in sorted(sums, key=lambda name: -sum(sums[name][3:5]))[:_MOST_ROWS]:
        requests, prompt, output, *seconds = sums[user]
        rows.append((user or "no user", f"{requests:,.0f}", f"{prompt:,.0f}", f"{output:,.0f}", *_seconds(*seconds)))
    return TextTable(("user", "requests", *_COLUMNS), rows)


def _seconds(*values: float) -> list[str]:
    return [seconds_text(float(value)) for value in values]
