"""Numbers as texts."""

from __future__ import annotations


def is_number(text: str) -> bool:
    """Return whether `float` reads the text."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def counted(count: int, noun: str) -> str:
    """Write a count of things: `1 request`, `1,024 requests`, `2 micro-batches`."""
    plural = "es" if noun.endswith("ch") else "s"
    return f"{count:,} {noun}{'' if count == 1 else plural}"
