"""What a search found, as rows of text: the terminal and the page show the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..report.text import milliseconds, percent
from .capacity import Capacity
from .search import Finalist, Found, Tried
from .space import chunk_key

RUNGS = {"first": "a quarter", "second": "half", "whole": "all"}


@dataclass(frozen=True, slots=True)
class Rows:
    """A table: the first column and those in `texts` stand left, the others right."""

    heads: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    texts: frozenset[int] = frozenset({0})


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
            milliseconds(finalist.numbers["p99_ttft_ms"]),
            milliseconds(finalist.numbers["p99_itl_ms"]),
            f"{finalist.numbers['output_throughput']:,.0f}",
            percent(finalist.numbers["bubble_fraction_inner"]),
            percent(finalist.numbers["peak_kv_fraction"]),
            limit_text(finalist.capacities[0]),
        )
        for place, finalist in enumerate(finalists, 1)
    ]
    return Rows(heads, rows, frozenset({0, 7}))


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
        share = percent(capacity.rate / best)
        rows.append((str(candidate.chunk), rate_text(capacity.rate), share, milliseconds(ttft), milliseconds(tbt),
                     limit_text(capacity)))  # fmt: skip
    return Rows((key, "requests/s", "of the best", "TTFT p99", "TBT p99", "what keeps it from more"), rows,
                frozenset({5}))  # fmt: skip


def grid_rows(found: Found) -> Rows:
    """Of each grid the setting that came furthest, and why it is not the winner."""
    best: dict[str, Tried] = {}
    for tried in sorted(found.tried, key=_place):
        best.setdefault(tried.candidate.grid, tried)
    winner = found.winner.candidate if found.winner else None
    rows = [
        (grid, tried.candidate.label.removeprefix(f"{grid} "), rate_text(tried.low) if tried.low else "-",
         rate_text(tried.bound.rate), "the best" if tried.candidate == winner else tried.why)
        for grid, tried in best.items()
    ]  # fmt: skip
    return Rows(("grid", "its best setting", "carried", "bound", "why not"), rows, frozenset({0, 1, 4}))


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
            RUNGS.get(tried.reached, "-"),
            rate_text(tried.low) if tried.low else "-",
            milliseconds(at.ttft_p99_ms if at else None),
            milliseconds(at.tbt_p99_ms if at else None),
            rate_text(tried.bound.rate),
            "the best" if tried.candidate == winner else tried.why,
        ))  # fmt: skip
    heads = ("setting", "seen on", "carried", "TTFT p99", "TBT p99", "bound", "why not the best")
    return Rows(heads, rows, frozenset({0, 1, 6}))


def _place(tried: Tried) -> tuple[int, bool, float, float]:
    reached = list(RUNGS).index(tried.reached) if tried.reached else -1
    return -reached, bool(tried.why) and not tried.low, -tried.low, -tried.bound.rate
