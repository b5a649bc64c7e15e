"""How numbers and causes are written, on the page and in the terminal."""

from __future__ import annotations

from ..ledger.ledger import Cause

_LABELS = {
    Cause.PB1_PREFILL_SIZE: "PB1 prefill size",
    Cause.PB2_PREFILL_DECODE: "PB2 prefill / decode",
    Cause.PB3_DECODE_CONTEXT: "PB3 decode context",
    Cause.STARVED_NO_REQUEST: "starved: no request",
    Cause.STARVED_IN_FLIGHT: "starved: all in flight",
    Cause.STARVED_KV_FULL: "starved: KV full",
    Cause.FILL_DRAIN: "fill and drain",
}
_SHORT = {
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
    """A cause as people read it."""
    return _LABELS.get(cause, str(cause).replace("_", " "))


def short_cause_label(cause: Cause) -> str:
    """The same where room is scarce."""
    return _SHORT.get(cause, cause_label(cause))


def css_name(cause: Cause) -> str:
    """The style sheet's name of a cause's colour."""
    return str(cause).replace("_", "-")


def ms_text(value: float | None) -> str:
    """`12.3 ms`, `1.23 s` or `45 µs`."""
    if value is None:
        return "-"
    if abs(value) < 0.0995:
        return f"{value * 1e3:.3g} µs" if abs(value) >= 5e-4 else "0 ms"
    if value >= 999.5:
        return f"{value / 1e3:.2f} s"
    return f"{value:.0f} ms" if value >= 99.95 else f"{value:.1f} ms" if value >= 9.995 else f"{value:.3g} ms"


def seconds_text(value: float) -> str:
    """`1.23 s`, or `12.3 ms` under a second."""
    return f"{value:,.2f} s" if value >= 1.0 else ms_text(value * 1e3) if value >= 5e-7 else "0"


def percent_text(share: float) -> str:
    return f"{share * 100:.1f}%"
