"""Formats numbers and causes as text, the same on pages, in figures and in the terminal."""

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
    """Return the display label of a cause."""
    return _LABELS.get(cause, str(cause).replace("_", " "))


def short_cause_label(cause: Cause) -> str:
    """Return a short label of a cause, for narrow boxes."""
    return _SHORT_LABELS.get(cause, cause_label(cause))


def css_name(cause: Cause) -> str:
    """Return the style sheet's name of a cause's colour."""
    return str(cause).replace("_", "-")


def tick_texts(values: Sequence[float]) -> list[str]:
    """Format the numbers at the ticks of an axis, all with as many decimals as their distance needs."""
    distance = min((abs(b - a) for a, b in pairwise(values)), default=abs(values[0]) if values else 1.0)
    decimals = next((d for d in range(7) if abs(round(distance, d) - distance) < 1e-6 * max(distance, 1e-12)), 6)
    return [f"{value:,.{decimals}f}" if abs(value) > 1e-12 else "0" for value in values]


def time_unit(seconds: float) -> tuple[str, float]:
    """Return a readable unit for `seconds`, and the factor from seconds to that unit."""
    return ("s", 1.0) if seconds >= 2.0 else ("ms", 1e3) if seconds >= 2e-3 else ("µs", 1e6)
