"""Tables of what a search found, as text. The terminal and the page show the same tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..core.numbers import counted
from ..drawing.formatting import ms_text, percent_text
from .capacity import Capacity
from .closest import Approach
from .error_range import ErrorRange
from .paired import Difference, Verdict
from .search_result import Finalist, SearchResult, TriedCandidate
from .space import chunk_key

RUNGS = {"first": "quarter", "second": "half", "whole": "all"}  # what share of the requests each rung simulates


@dataclass(frozen=True, slots=True)
class TextTable:
    """A table of text.

    Attributes:
        heads: Headings of the columns.
        rows: The cells of each row.
        left_columns: Columns that are aligned left; the others are aligned right.
        optional_columns: Columns that are left out where there is no room, the last one first.
    """

    heads: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    left_columns: frozenset[int] = frozenset({0})
    optional_columns: tuple[int, ...] = ()

    def fitting_columns(self, width: int, *, gap: int, last_width: int) -> list[int]:
        """Return the columns that fit into `width` letters.

        Args:
            width: Letters of a line.
            gap: Letters between two columns.
            last_width: Letters of the last column, which may be broken into lines.
        """
        kept = list(range(len(self.heads)))
        optional = list(self.optional_columns)
        while optional and self.letters(kept[:-1], gap) + last_width > width:
            kept.remove(optional.pop())
        return kept

    def letters(self, columns: Sequence[int], gap: int) -> int:
        """Return how many letters a line of these columns has, each with its gap."""
        return sum(max(len(line[n]) for line in (self.heads, *self.rows)) + gap for n in columns)


def rate_text(rate: float) -> str:
    """Write a rate with three significant digits."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def finalist_rows(finalists: Sequence[Finalist]) -> TextTable:
    """Make the table of the best settings, with the numbers of a run at their rate."""
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
    return TextTable(heads, rows, frozenset({0, 10}), optional_columns=(2, 3, 5, 6, 4, 8, 9, 7))


def range_text(off: ErrorRange | None) -> str:
    """Write a range in requests/s: `1.9 to 2.5`; `-` where there is none."""
    return "-" if off is None else f"{rate_text(off.low)} to {rate_text(off.high)}"


def behind_text(behind: Difference, verdict: Verdict) -> str:
    """Write how much less than the best a setting carries, in requests/s, and whether that tells them apart."""
    if verdict == "best":
        return "the most"
    words = {"less": "", "equal": ", equal", "tie": ", a tie"}
    return difference_text(behind) + words[verdict]


def difference_text(difference: Difference) -> str:
    """Write a difference in requests/s, with its interval: `0.12 ± 0.05`."""
    if difference.half is None:
        return f"{difference.mean:.3g}"
    scale = max(abs(difference.mean), difference.half)
    digits = max(0, 1 - math.floor(math.log10(scale))) if scale > 0.0 else 0
    mean = round(difference.mean, digits) + 0.0  # no negative zero
    return f"{mean:.{digits}f} ± {difference.half:.{digits}f}"


def tie_text(names: Sequence[str], behind: Sequence[Difference], why_first: str) -> str:
    """Say which settings cannot be told apart; empty if there are no two.

    Args:
        names: The settings, the one that comes first first.
        behind: How far each is behind the one with the highest mean.
        why_first: Why the first one comes first.
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
    """Make the table of the settings that come closest to an SLO that none meets."""
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
    last = len(heads) - 1
    return TextTable(heads, rows, frozenset({0, last}), optional_columns=tuple(range(last - 1, 0, -1)))


def limit_text(capacity: Capacity) -> str:
    """Say why a capacity is not higher."""
    if capacity.limit is None:
        return f"no schedule carries {rate_text(capacity.above)}" if capacity.above else ""
    return f"{capacity.why} at {rate_text(capacity.above)}" if capacity.above else capacity.why


def chunk_rows(found: SearchResult) -> TextTable:
    """Make the table of the winner with each chunk."""
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
    return TextTable(heads, rows, frozenset({5}), optional_columns=(3, 2))


def grid_rows(found: SearchResult) -> TextTable:
    """Make the table of the setting of each grid that came furthest, and why it is not the winner."""
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
    return TextTable(heads, rows, frozenset({0, 1, 4}), optional_columns=(3,))


def misfit_rows(found: SearchResult) -> TextTable:
    """Make the table of the grids that cannot hold the model, each with the reason."""
    rows = [(f"tp{m.tp} pp{m.pp}" + (f" x{m.replicas}" if m.replicas > 1 else ""), m.why) for m in found.misfits]
    return TextTable(("grid", "why"), rows, frozenset({0, 1}))


def tried_rows(found: SearchResult) -> TextTable:
    """Make the table of every setting, the one that came furthest first."""
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
    return TextTable(heads, rows, frozenset({0, 5}))


def _carried(tried: TriedCandidate) -> str:
    """Write the rate that was carried, and on what share of the requests if not on all."""
    if not tried.low:
        return "-"
    return rate_text(tried.low) + (f" ({RUNGS[tried.rung]})" if tried.rung != "whole" else "")


def _furthest_first(tried: TriedCandidate) -> tuple[int, bool, float, float]:
    """Order candidates by how far they came, then by the rate that they carried."""
    reached = list(RUNGS).index(tried.reached) if tried.reached else -1
    return -max(reached, 2 * (tried.rung == "whole")), not tried.low, -tried.low, -tried.bound.rate
