"""What a search found, as rows of text: the terminal and the page show the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..report.formatting import ms_text, percent_text
from .capacity import Capacity
from .search import Finalist, Found, Tried
from .space import chunk_key

RUNGS = {"first": "quarter", "second": "half", "whole": "all"}  # of the requests


@dataclass(frozen=True, slots=True)
class Rows:
    """A table: columns in `texts` stand left, the others right, the last may be broken; where room is scarce, those in
    `spare` are left out, the last first."""

    heads: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    texts: frozenset[int] = frozenset({0})
    spare: tuple[int, ...] = ()

    def fitting(self, width: int, apart: int, last: int) -> list[int]:
        """Columns that fit into `width` with `apart` between two and `last` for the last one."""
        kept = list(range(len(self.heads)))
        spare = list(self.spare)

        def needed() -> int:
            own = (max(len(line[n]) for line in (self.heads, *self.rows)) + apart for n in kept[:-1])
            return sum(own) + last

        while spare and needed() > width:
            kept.remove(spare.pop())
        return kept


def rate_text(rate: float) -> str:
    """Requests/s, three digits that count."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def finalist_rows(finalists: Sequence[Finalist]) -> Rows:
    """The best settings, with the numbers of a run at their rate."""
    heads = ("setting", "requests/s", "TTFT p99", "TBT p99", "output tok/s", "bubbles", "KV", "what keeps it from more")
    rows = [
        (
            f"{place}. {finalist.candidate.label}",
            finalist.interval.text,
            ms_text(finalist.numbers["p99_ttft_ms"]),
            ms_text(finalist.numbers["p99_itl_ms"]),
            f"{finalist.numbers['output_throughput']:,.0f}",
            percent_text(finalist.numbers["bubble_fraction_inner"]),
            percent_text(finalist.numbers["peak_kv_fraction"]),
            limit_text(finalist.capacities[0]),
        )
        for place, finalist in enumerate(finalists, 1)
    ]
    return Rows(heads, rows, frozenset({0, 7}), spare=(2, 3, 5, 6, 4))


def limit_text(capacity: Capacity) -> str:
    """Why a capacity is not higher."""
    if capacity.limit is None:
        return ""
    return f"{capacity.why} at {rate_text(capacity.above)}" if capacity.above else capacity.why


def chunk_rows(found: Found) -> Rows:
    """The winner with each chunk."""
    if not found.chunks:
        return Rows((), [])
    best = max(capacity.rate for _, capacity in found.chunks) or 1.0
    key = str(chunk_key(found.chunks[0][0].policy))
    rows = []
    for candidate, capacity in found.chunks:
        ttft = capacity.at.ttft_p99_ms if capacity.at else None
        tbt = capacity.at.tbt_p99_ms if capacity.at else None
        share = percent_text(capacity.rate / best)
        rate = rate_text(capacity.rate) if capacity.rate or not capacity.above else f"under {rate_text(capacity.above)}"
        rows.append((str(candidate.chunk), rate, share if capacity.rate else "-", ms_text(ttft), ms_text(tbt),
                     limit_text(capacity)))  # fmt: skip
    heads = (key, "requests/s", "of the best", "TTFT p99", "TBT p99", "what keeps it from more")
    return Rows(heads, rows, frozenset({5}), spare=(3, 2))


def grid_rows(found: Found) -> Rows:
    """Of each grid the setting that came furthest, and why it is not the winner."""
    best: dict[str, Tried] = {}
    for tried in sorted(found.tried, key=_place):
        best.setdefault(tried.candidate.grid, tried)
    winner = found.winner.candidate if found.winner else None
    rows = [
        (grid, tried.candidate.label.removeprefix(f"{grid} "), _carried(tried), rate_text(tried.bound.rate),
         "the best" if tried.candidate == winner else tried.why)
        for grid, tried in best.items()
    ]  # fmt: skip
    heads = ("grid", "its best setting", "carried", "bound", "why not")
    return Rows(heads, rows, frozenset({0, 1, 4}), spare=(3,))


def misfit_rows(found: Found) -> Rows:
    """Grids that cannot be, each with its reason."""
    rows = [(f"tp{m.tp} pp{m.pp}" + (f" x{m.replicas}" if m.replicas > 1 else ""), m.why) for m in found.misfits]
    return Rows(("grid", "why"), rows, frozenset({0, 1}))


def tried_rows(found: Found) -> Rows:
    """Every setting, the one that came furthest first."""
    winner = found.winner.candidate if found.winner else None
    rows = []
    for tried in sorted(found.tried, key=_place):
        at = tried.at
        rows.append((
            tried.candidate.label,
            _carried(tried),
            ms_text(at.ttft_p99_ms if at else None),
            ms_text(at.tbt_p99_ms if at else None),
            rate_text(tried.bound.rate),
            "the best" if tried.candidate == winner else tried.why,
        ))  # fmt: skip
    heads = ("setting", "carried", "TTFT p99", "TBT p99", "bound", "why not the best")
    return Rows(heads, rows, frozenset({0, 5}))


def _carried(tried: Tried) -> str:
    """A rate, and on how many of the requests, where not on all."""
    if not tried.low:
        return "-"
    return rate_text(tried.low) + (f" ({RUNGS[tried.rung]})" if tried.rung != "whole" else "")


def _place(tried: Tried) -> tuple[int, bool, float, float]:
    """The order of what was tried: how far it came, then what it carried."""
    reached = list(RUNGS).index(tried.reached) if tried.reached else -1
    return -max(reached, 2 * (tried.rung == "whole")), not tried.low, -tried.low, -tried.bound.rate
