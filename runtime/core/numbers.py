"""Formats numbers as text."""

from __future__ import annotations


def is_number(text: str) -> bool:
    """Return whether `float` can parse the text."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def counted(count: int, noun: str) -> str:
    """Write a count of things: `1 request`, `1,024 requests`, `2 micro-batches`."""
    plural = "es" if noun.endswith("ch") else "s"
    return f"{count:,} {noun}{'' if count == 1 else plural}"


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
