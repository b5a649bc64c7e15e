"""`report.html` of a search: the best setting, the commands that run it, and all settings that were tried."""

from __future__ import annotations

import html
from collections.abc import Mapping
from importlib import resources

from ...conf.tuning import TuneConfig
from ..core.numbers import counted
from ..cost.error import error_text
from ..drawing.page_parts import whole_page
from ..drawing.svg import figures
from .charts import charts
from .closest import unmet_note
from .error_range import range_note
from .lead import lead_of
from .search_result import SearchResult
from .space import chunk_key
from .tables import (
    TextTable,
    chunk_rows,
    closest_rows,
    finalist_rows,
    misfit_rows,
    range_text,
    rate_text,
    tie_text,
    tried_rows,
)


def render(found: SearchResult, config: TuneConfig, title: str, subtitle: str, commands: Mapping[str, str]) -> str:
    """Render the page of a search; it needs no other file.

    Args:
        found: The result of the search.
        config: Its config.
        title: Heading of the page.
        subtitle: The line below it.
        commands: Commands that run the winner, by what they do.
    """
    body, style = (
        resources.files(__package__).joinpath(f"tune.{kind}").read_text(encoding="utf-8") for kind in ("html", "css")
    )
    shown = [
        f'<p class="hint">{html.escape(what)}</p>\n<pre class="command">{html.escape(command)}</pre>'
        for what, command in commands.items()
    ]
    tried = tried_rows(found)
    notes = (("next", lead_note(found)), ("error", error_note(found)))
    return whole_page(
        body,
        {
            "title": html.escape(title),
            "subtitle": html.escape(subtitle),
            "cards": "\n".join(_card(*card) for card in cards(found, config)),
            "commands": "\n".join(shown) or f'<p class="none">{html.escape(unmet_note(found.closest))}</p>',
            "finalists_title": "The best settings" if found.finalists else "The closest settings",
            "finalists": table(finalist_rows(found.finalists) if found.finalists else closest_rows(found.closest)),
            "ties": html.escape(ties_note(found)),
            "error": "".join(f"  <p><b>{name}</b> {html.escape(note)}</p>\n" for name, note in notes if note),
            "finalists_note": html.escape(finalists_note(found)),
            "charts": figures(charts(found, config.slo)),
            "chunks": table(chunk_rows(found)),
            "misfits": table(misfit_rows(found)) if found.misfits else '<p class="none">every grid fits</p>',
            "tried": table(tried),
            "tried_note": html.escape(tried_note(found)),
            "tried_summary": f"all {len(tried.rows)} settings",
        },
        style,
    )


def cards(found: SearchResult, config: TuneConfig) -> list[tuple[str, str, str]]:
    """Return the main results as cards: a name, a value (HTML) and a note."""
    winner = found.winner
    if winner is None:
        near = [("closest", f"{one.times:.3g}x", one.text) for one in found.closest[:1]]
        return [("capacity", "0", "no setting meets the SLO at any rate"), *near]
    candidate = winner.candidate
    devices = config.nodes * config.cluster.devices_per_node
    per_device = winner.interval.mean / devices
    shown = [
        ("capacity", f"{rate_text(winner.interval.mean)} <small>requests/s</small>", interval_note(found)),
        *([("ties", str(len(found.ties)), "settings that cannot be told apart; see the table")] if found.ties else []),
        ("grid", html.escape(candidate.grid), f"{counted(devices, 'device')}, {per_device:.3g} requests/s each"),
        ("policy", html.escape(candidate.policy.name), ""),
    ]
    if candidate.chunk is not None:
        shown.append((str(chunk_key(candidate.policy)), str(candidate.chunk), "tokens of a micro-batch"))
    if found.asked is not None:
        shown.append(("asked", f"{rate_text(found.asked)} <small>requests/s</small>", asked_note(found)))
    return shown


def interval_note(found: SearchResult) -> str:
    """Say how certain the winner's capacity is."""
    winner = found.winner
    assert winner is not None
    interval = winner.interval
    times = f"; {range_text(winner.off)} if stage times are off" if winner.off is not None else ""
    if interval.half is None:
        return f"one seed; more tell how sure that is{times}"
    return f"{interval.text.partition(' ')[2]}, the 95% interval over {len(winner.capacities)} seeds{times}"


def error_note(found: SearchResult) -> str:
    """Say how far stage times may be off, and what the range of each finalist means."""
    note = range_note(found.error) if found.finalists else ""
    return f"{error_text(found.error)}. {note}".strip()


def lead_note(found: SearchResult) -> str:
    """Say whether the winner's lead outlasts the error of stage times; empty if there is no lead or no error known."""
    lead = lead_of(found.finalists)
    return lead.text if lead is not None else ""


def ties_note(found: SearchResult) -> str:
    """Say which finalists cannot be told apart, and why the first comes first; empty if the winner stands alone."""
    ties = found.ties
    if not ties:
        return ""
    if ties[0].verdict == "best":
        why = "The first has the highest mean."
    else:
        why = "The first is the simplest to run of those within 2% of the highest mean."
    return tie_text([tied.candidate.label for tied in ties], [tied.behind for tied in ties], why)


def asked_note(found: SearchResult) -> str:
    """Say whether the winner carries the workload's own rate."""
    winner, asked = found.winner, found.asked
    assert winner is not None
    assert asked is not None
    share = winner.interval.lowest / asked
    return f"carried: the capacity is {share:.2f}x that" if share >= 1.0 else f"not carried, only {share:.0%} of it"


def finalists_note(found: SearchResult) -> str:
    """Say what the numbers of the finalists are."""
    bubbles = (
        "Bubbles: idle without starved, recovery, fill and drain, over all stage time "
        "(docs/ledger.md#idle-and-bubbles)."
    )
    if not found.finalists:
        least = "At the lowest rate that is tried. Requests hardly meet there, so tails are as short as they can be."
        return f"{least} {bubbles}"
    seeds = len(found.finalists[0].capacities)
    over = "mean and 95% interval over its seeds, " if seeds > 1 else ""
    requests = counted(found.finalists[0].numbers["completed"], "request")
    note = f"Capacity: {over}{requests} each; the other numbers are of one run at that rate."
    if seeds > 1 and len(found.finalists) > 1:
        note += (
            " How much less than the best one a setting carries is the mean over the same seeds and the same arrivals, "
            "with an interval that holds for all settings and for every look at them."
        )
    return f"{note} {bubbles}"


def tried_note(found: SearchResult) -> str:
    """Say how much was simulated."""
    bounded = sum(tried.requests == 0 for tried in found.tried)
    return (
        f"{counted(len(found.tried), 'setting')}, {bounded} of them ruled out by their bound alone; "
        f"{counted(found.simulations, 'simulation')} of {counted(found.requests, 'request')}, and "
        f"{found.confirming_requests:,} more to confirm."
    )


def table(rows: TextTable) -> str:
    """Render a table as HTML."""
    if not rows.rows:
        return '<p class="none">none</p>'
    last = len(rows.heads) - 1

    def css(column: int) -> str:
        if column not in rows.left_columns:
            return ""
        return ' class="why"' if column == last else ' class="text"'

    heads = "".join(f"<th{css(n)}>{html.escape(head)}</th>" for n, head in enumerate(rows.heads))
    lines = ("".join(f"<td{css(n)}>{html.escape(cell)}</td>" for n, cell in enumerate(row)) for row in rows.rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"


def _card(what: str, value: str, note: str) -> str:
    return f'<div class="card"><h3>{what}</h3><div class="value">{value}</div><p>{html.escape(note)}</p></div>'
