"""Writes numbers and causes as text, the same on pages, in figures and in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from ..ledger.causes import Cause

_LABELS = {
    Cause.PB1_PREFILL_SIZE: "PB1 prefill size",
    Cause.PB2_PREFILL_DECODE: "PB2 prefill / decode",
    Cause.PB3_DECODE_CONTEXT: "PB3 decode context",
    Cause.STARVED_NO_REQUEST: "starved: no request",
    Cause.STARVED_IN_FLIGHT: "starved: all in flight",
    Cause.STARVED_KV_FULL: "starved: KV full",
    Cause.FILL_DRAIN: "fill and drain",
}
_SHORT_LABELS = {
    Cause.PB1_PREFILL_SIZE: "PB1",
    Cause.PB2_PREFILL_DECODE: "PB2",
    Cause.PB3_DECODE_CONTEXT: "PB3",
    Cause.STAGE_IMBALANCE: "imbalance",
    Cause.STARVED_NO_REQUEST: "no request",
    Cause.STARVED_IN_FLIGHT: "in flight",
    Cause.STARVED_KV_FULL: "KV full",
    Cause.FILL_DRAIN: "fill, drain",
}


def cause_label(cause: Cause) -> str:
    """Return a cause as people read it."""
    return _LABELS.get(cause, str(cause).replace("_", " "))


def short_cause_label(cause: Cause) -> str:
    """Return a short label of a cause, for narrow boxes."""
    return _SHORT_LABELS.get(cause, cause_label(cause))


def css_name(cause: Cause) -> str:
    """Return the style sheet's name of a cause's colour."""
    return str(cause).replace("_", "-")


def ms_text(value: float | None) -> str:
    """Write milliseconds as `12.3 ms`, `1.23 s` or `45 µs`; a dash for None."""
    if value is None:
        return "-"
    if abs(value) < 0.0995:
        return f"{value * 1e3:.3g} µs" if abs(value) >= 5e-4 else "0 ms"
    if value >= 999.5:
        return f"{value / 1e3:.2f} s"
    return f"{value:.0f} ms" if value >= 99.95 else f"{value:.1f} ms" if value >= 9.995 else f"{value:.3g} ms"


def seconds_text(value: float) -> str:
    """Write seconds as `1.23 s`, or as `12.3 ms` below a second."""
    return f"{value:,.2f} s" if value >= 1.0 else ms_text(value * 1e3) if value >= 5e-7 else "0"


def percent_text(share: float) -> str:
    """Write a share of 1 as `12.3%`."""
    return f"{share * 100:.1f}%"


def number_text(value: float) -> str:
    """Write a number with about three significant digits."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}" if abs(value) >= 1 else f"{value:.3g}"


def tick_texts(values: Sequence[float]) -> list[str]:
    """Write the numbers at an axis' ticks, all with as many decimals as their distance needs."""
    distance = min((abs(b - a) for a, b in pairwise(values)), default=abs(values[0]) if values else 1.0)
    decimals = next((d for d in range(7) if abs(round(distance, d) - distance) < 1e-6 * max(distance, 1e-12)), 6)
    return [f"{value:,.{decimals}f}" if abs(value) > 1e-12 else "0" for value in values]


def time_unit(seconds: float) -> tuple[str, float]:
    """Return the unit in which `seconds` reads well, and how many of that unit make a second."""
    return ("s", 1.0) if seconds >= 2.0 else ("ms", 1e3) if seconds >= 2e-3 else ("µs", 1e6)
