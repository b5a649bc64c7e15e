"""Numbers as people and files write them."""

from __future__ import annotations


def is_number(text: str) -> bool:
    """Whether `float` reads it."""
    try:
        float(text)
    except ValueError:
        return False
    return True
