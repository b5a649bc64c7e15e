"""Tables of a search's results, as text. The terminal and the page show the same tables."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ....core.numbers import counted, ms_text, percent_text
from ....simulation.tuning.capacity import Capacity
from ....simulation.tuning.closest import Approach
from ....simulation.tuning.error_range import range_text, rate_text
from ....simulation.tuning.paired import Difference, Verdict
from ....simulation.tuning.search_result import Finalist, SearchResult, TriedCandidate
from ....simulation.tuning.space import chunk_key
from ...drawing.text_table import TextTable

RUNGS = {"first": "quarter", "second": "half", "whole": "all"}  # share of the requests that each rung simulates


def finalist_rows(finalists: Sequence[Finalist]) -> TextTable:
    """Build the table of the best settings, with the numbers of a run at their rate."""
    heads = (
        *("setting", "requests/s", "if times are off", "less than the best", "seeds", "TTFT p99", "TBT p99"),
        *("output tok/s", "bubbles", "KV", "what keeps it from more"),
    )
    rows = [
        (
            f"{place}. {finalist.candidate.label}",
            finalist.interval.text,
            range_text(finalist.off),
            behind_text(finalist.behind, finalist.verdict),
            str(len(finalist.capacities)),
            ms_text(finalist.numbers["p99_ttft_ms"]),
            ms_text(finalist.numbers["p99_itl_ms"]),
            f"{finalist.numbers['output_throughput']:,.0f}",
            percent_text(finalist.numbers["bubble_fraction_inner"]),
            percent_text(finalist.numbers["peak_kv_fraction"]),
            limit_text(finalist.capacities[0]),
        )
        for place, finalist in enumerate(finalists, 1)
    ]
    optional = (
        "if times are off",
        "less than the best",
        "TTFT p99",
        "TBT p99",
        "seeds",
        "bubbles",
        "KV",
        "output tok/s",
    )
    return TextTable(heads, rows, "The best settings", ("setting", "what keeps it from more"), optional)


def behind_text(behind: Difference, verdict: Verdict) -> str:
    """Format by how much a setting carries less than the best, in requests/s, and whether they are tied."""
    if verdict == "best":
        return "the most"
    words = {"less": "", "equal": ", equal", "tie": ", a tie"}
    return difference_text(behind) + words[verdict]


def difference_text(difference: Difference) -> str:
    """Format a difference in requests/s, with its interval: `0.12 ± 0.05`."""
    if difference.half is None:
        return f"{difference.mean:.3g}"
    scale = max(abs(difference.mean), difference.half)
    digits = max(0, 1 - math.floor(math.log10(scale))) if scale > 0.0 else 0
    mean = round(difference.mean, digits) + 0.0  # no negative zero
    return f"{mean:.{digits}f} ± {difference.half:.{digits}f}"


def tie_text(names: Sequence[str], behind: Sequence[Difference], why_first: str) -> str:
    """List the statistically tied settings; empty if there are fewer than two.

    Args:
        names: The settings, the top-ranked one first.
        behind: The difference of each to the highest mean.
        why_first: Why the first one is ranked first.
    """
    if len(names) < 2:
        return ""
    seeds = min(difference.seeds for difference in behind)
    farthest = max(behind, key=lambda difference: difference.mean)
    apart = f"up to {difference_text(farthest)}" if len(names) > 2 else difference_text(farthest)
    return (
        f"{len(names)} settings cannot be told apart on {counted(seeds, 'seed')}: {'; '.join(names)}. "
        f"They differ by {apart} requests/s. {why_first}"
    )


def closest_rows(closest: Sequence[Approach]) -> TextTable:
    """Build the table of the settings closest to an unmet SLO."""
    heads = ("setting", "requests/s", *(f"{tail.name} p99" for one in closest[:1] for tail in one.tails), "misses")
    rows = [
        (
            f"{place}. {one.label}",
            f"{one.trial.rate:.2g}",
            *(ms_text(tail.p99_ms) for tail in one.tails),
            ", ".join(
                f"{tail.key}={tail.bound_ms:.10g} by {ms_text(tail.p99_ms - tail.bound_ms)}"
                for tail in one.tails
                if tail.times > 1.0
            )
            or one.trial.why,
        )
        for place, one in enumerate(closest, 1)
    ]
    return TextTable(heads, rows, "The closest settings", ("setting", "misses"), heads[-2:0:-1])


def limit_text(capacity: Capacity) -> str:
    """Return why a capacity is not higher."""
    if capacity.limit is None:
        return f"no schedule carries {rate_text(capacity.above)}" if capacity.above else ""
    return f"{capacity.why} at {rate_text(capacity.above)}" if capacity.above else capacity.why


def chunk_rows(found: SearchResult) -> TextTable:
    """Build the table of the winner with each chunk size."""
    if not found.chunks:
        return TextTable((), [])
    best = max(capacity.rate for _, capacity in found.chunks) or 1.0
    key = str(chunk_key(found.chunks[0][0].policy))
    rows = []
    for candidate, capacity in found.chunks:
        ttft = capacity.trial.ttft_p99_ms if capacity.trial else None
        tbt = capacity.trial.tbt_p99_ms if capacity.trial else None
        share = percent_text(capacity.rate / best)
        rate = rate_text(capacity.rate) if capacity.rate or not capacity.above else f"under {rate_text(capacity.above)}"
        rows.append(
            (
                str(candidate.chunk),
                rate,
                share if capacity.rate else "-",
                ms_text(ttft),
                ms_text(tbt),
                limit_text(capacity),
            )
        )
    heads = (key, "requests/s", "of the best", "TTFT p99", "TBT p99", "what keeps it from more")
    return TextTable(heads, rows, "Which chunk size", ("what keeps it from more",), ("TTFT p99", "of the best"))


def grid_rows(found: SearchResult) -> TextTable:
    """Build the table of the setting of each grid that came furthest, and why it is not the winner."""
    best: dict[str, TriedCandidate] = {}
    for tried in sorted(found.tried, key=_furthest_first):
        best.setdefault(tried.candidate.grid, tried)
    winner = found.winner.candidate if found.winner else None
    rows = [
        (
            grid,
            tried.candidate.label.removeprefix(f"{grid} "),
            _carried(tried),
            rate_text(tried.bound.rate),
            "the best" if tried.candidate == winner else tried.why,
        )
        for grid, tried in best.items()
    ]
    heads = ("grid", "its best setting", "carried", "bound", "why not")
    return TextTable(heads, rows, "Grids", ("grid", "its best setting", "why not"), ("bound",))


def misfit_rows(found: SearchResult) -> TextTable:
    """Build the table of the grids that the model does not fit, with the reasons."""
    rows = [(f"tp{m.tp} pp{m.pp}" + (f" x{m.replicas}" if m.replicas > 1 else ""), m.why) for m in found.misfits]
    return TextTable(("grid", "why"), rows, "What does not fit", ("grid", "why"))


def tried_rows(found: SearchResult) -> TextTable:
    """Build the table of all settings, the one that came furthest first."""
    winner = found.winner.candidate if found.winner else None
    rows = []
    for tried in sorted(found.tried, key=_furthest_first):
        trial = tried.low_trial
        rows.append(
            (
                tried.candidate.label,
                _carried(tried),
                ms_text(trial.ttft_p99_ms if trial else None),
                ms_text(trial.tbt_p99_ms if trial else None),
                rate_text(tried.bound.rate),
                "the best" if tried.candidate == winner else tried.why,
            )
        )
    heads = ("setting", "carried", "TTFT p99", "TBT p99", "bound", "why not the best")
    return TextTable(heads, rows, left=("setting", "why not the best"))


def _carried(tried: TriedCandidate) -> str:
    """Format the rate carried, and the share of the requests if not all were simulated."""
    if not tried.low:
        return "-"
    return rate_text(tried.low) + (f" ({RUNGS[tried.rung]})" if tried.rung != "whole" else "")


def _furthest_first(tried: TriedCandidate) -> tuple[int, bool, float, float]:
    """Return the sort key of a candidate: by how far it came, then by the rate it carried."""
    reached = list(RUNGS).index(tried.reached) if tried.reached else -1
    return -max(reached, 2 * (tried.rung == "whole")), not tried.low, -tried.low, -tried.bound.rate
