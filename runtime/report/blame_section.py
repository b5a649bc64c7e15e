"""Who cost others time: the requests and users that others waited for most."""

from __future__ import annotations

import html
from collections import defaultdict

import numpy as np

from ..core.request_record import RequestRecord
from ..core.run_record import RunRecord
from ..drawing.formatting import seconds_text
from ..drawing.page_parts import row, table
from ..ledger.blame import Blame

_MOST_ROWS = 10
_HINT = (
    "What others lost to a request: its share of the compute of micro-batches that they were in with it, or waited for "
    '(docs/ledger.md#blame). "Lost" is what it lost to others itself. All that is charged is all that is lost.'
)


def top_requests(blame: Blame, count: int) -> list[int]:
    """Return the places of the requests that cost others most, most first."""
    cost = blame.ttft.cost + blame.tbt.cost
    return [int(place) for place in np.argsort(-cost, kind="stable")[:count] if cost[place] > 0]


def request_name(request: RequestRecord) -> str:
    """Name a request for people, with its user where it has one."""
    return f"request {request.request}" + (f" of {request.user}" if request.user else "")


def blame_section(record: RunRecord, blame: Blame) -> str:
    """Render the section; empty if nobody cost others anything."""
    places = top_requests(blame, _MOST_ROWS)
    if not places:
        return ""
    lost = blame.ttft.lost + blame.tbt.lost
    rows = []
    for place in places:
        request = record.requests[place]
        name = html.escape(request_name(request))
        sizes = f"{request.prompt_tokens:,}", f"{request.output_tokens:,}"
        rows.append(row(name, [*sizes, *_seconds(blame.ttft.cost[place], blame.tbt.cost[place], lost[place])]))
    heads = ("", "prompt", "output", "cost others TTFT", "cost others TBT", "lost")
    tables = table(heads, rows) + _users(record, blame)
    unrecorded = blame.ttft.unrecorded + blame.tbt.unrecorded
    note = f" Another {seconds_text(unrecorded)} were lost to requests that the record does not have."
    hint = _HINT + (note if unrecorded > 0 else "")
    return (
        f'<section id="blame">\n  <h2>Who cost others time</h2>\n  <p class="hint">{hint}</p>\n'
        f'  <div class="scroll">{tables}</div>\n</section>\n\n'
    )


def _users(record: RunRecord, blame: Blame) -> str:
    """Render the table of users; empty where there are fewer than two."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0] * 6)
    columns = (blame.ttft.cost, blame.tbt.cost, blame.ttft.lost + blame.tbt.lost)
    for place, request in enumerate(record.requests):
        added = (1, request.prompt_tokens, request.output_tokens, *(column[place] for column in columns))
        total = sums[request.user]
        for at, value in enumerate(added):
            total[at] += value
    if len(sums) < 2:
        return ""
    rows = []
    for user in sorted(sums, key=lambda name: -sum(sums[name][3:5]))[:_MOST_ROWS]:
        requests, prompt, output, *seconds = sums[user]
        sizes = f"{requests:,.0f}", f"{prompt:,.0f}", f"{output:,.0f}"
        rows.append(row(html.escape(user or "no user"), [*sizes, *_seconds(*seconds)]))
    return table(("user", "requests", "prompt", "output", "cost others TTFT", "cost others TBT", "lost"), rows)


def _seconds(*values: float) -> list[str]:
    return [seconds_text(float(value)) for value in values]
