"""`report.html` of a search: the best setting, the commands that run it, and all settings tried."""

from __future__ import annotations

import html
from collections.abc import Mapping

from .....conf.tuning import TuneConfig
from ....core.numbers import counted
from ....simulation.cost.error import error_text
from ....simulation.tuning.closest import unmet_note
from ....simulation.tuning.error_range import range_note, range_text, rate_text
from ....simulation.tuning.search_result import SearchResult
from ....simulation.tuning.space import chunk_key
from ...drawing.page_parts import cards, template, whole_page
from ...drawing.svg import figures
from ...drawing.text_table import TextTable
from .charts import charts
from .tables import chunk_rows, closest_rows, finalist_rows, misfit_rows, tie_text, tried_rows


def render(found: SearchResult, config: TuneConfig, title: str, subtitle: str, commands: Mapping[str, str]) -> str:
    """Render the self-contained page of a search.

    Args:
        found: The result of the search.
        config: Its config.
        title: Heading of the page.
        subtitle: The line below it.
        commands: Commands that run the winner, by their purpose.
    """
    shown = [
        f'<p class="hint">{html.escape(what)}</p>\n<pre class="command">{html.escape(command)}</pre>'
        for what, command in commands.items()
    ]
    tried = tried_rows(found)
    error = error_note(found)
    return whole_page(
        template("tune.html", __package__),
        {
            "title": html.escape(title),
            "subtitle": html.escape(subtitle),
            "cards": cards(main_numbers(found, config)),
            "commands": "\n".join(shown) or f'<p class="none">{html.escape(unmet_note(found.closest))}</p>',
            "finalists_title": "The best settings" if found.finalists else "The closest settings",
            "finalists": _table(finalist_rows(found.finalists) if found.finalists else closest_rows(found.closest)),
            "ties": html.escape(ties_note(found)),
            "error": f"  <p><b>error</b> {html.escape(error)}</p>\n",
            "finalists_note": html.escape(finalists_note(found)),
            "charts": figures(charts(found, config.slo)),
            "chunks": _table(chunk_rows(found)),
            "misfits": _table(misfit_rows(found), "every grid fits"),
            "tried": _table(tried),
            "tried_note": html.escape(tried_note(found)),
            "tried_summary": f"all {len(tried.rows)} settings",
        },
    )


def main_numbers(found: SearchResult, config: TuneConfig) -> list[tuple[str, str, str, str]]:
    """Return the main results: each a name, a value, its unit and a note."""
    winner = found.winner
    if winner is None:
        near = [("closest", f"{one.times:.3g}x", "", one.text) for one in found.closest[:1]]
        return [("capacity", "0", "", "no setting meets the SLO at any rate"), *near]
    candidate = winner.candidate
    devices = config.nodes * config.cluster.devices_per_node
    per_device = winner.interval.mean / devices
    shown = [
        ("capacity", rate_text(winner.interval.mean), "requests/s", interval_note(found)),
        *(
            [("ties", str(len(found.ties)), "", "settings that cannot be told apart; see the table")]
            if found.ties
            else []
        ),
        ("grid", candidate.grid, "", f"{counted(devices, 'device')}, {per_device:.3g} requests/s each"),
        ("policy", candidate.policy.name, "", ""),
    ]
    if candidate.chunk is not None:
        shown.append((str(chunk_key(candidate.policy)), str(candidate.chunk), "", "tokens of a micro-batch"))
    if found.asked is not None:
        shown.append(("asked", rate_text(found.asked), "requests/s", asked_note(found)))
    return shown


def interval_note(found: SearchResult) -> str:
    """Describe the confidence interval of the winner's capacity."""
    winner = found.winner
    assert winner is not None
    interval = winner.interval
    times = f"; {range_text(winner.off)} if stage times are off" if winner.off is not None else ""
    if interval.half is None:
        return f"one seed; more tell how sure that is{times}"
    return f"{interval.text.partition(' ')[2]}, the 95% interval over {len(winner.capacities)} seeds{times}"


def error_note(found: SearchResult) -> str:
    """Describe the error of stage times, and what the range of each finalist means."""
    note = range_note(found.error) if found.finalists else ""
    return f"{error_text(found.error)}. {note}".strip()


def ties_note(found: SearchResult) -> str:
    """Name the statistically tied finalists, and why the first is ranked first; empty if there are none."""
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
    """Explain the numbers of the finalists."""
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
    """Describe the amount of simulation."""
    bounded = sum(tried.requests == 0 for tried in found.tried)
    return (
        f"{counted(len(found.tried), 'setting')}, {bounded} of them ruled out by their bound alone; "
        f"{counted(found.simulations, 'simulation')} of {counted(found.requests, 'request')}, and "
        f"{found.confirming_requests:,} more to confirm."
    )


def _table(shown: TextTable, none: str = "none") -> str:
    return shown.html() if shown.rows else f'<p class="none">{none}</p>'
