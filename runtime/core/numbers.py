"""Numbers as texts, and the lower envelope of points."""

from __future__ import annotations

from collections.abc import Sequence


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


def lower_envelope(x: Sequence[float], y: Sequence[float]) -> list[int]:
    """Return the indices of the points on the lower convex envelope; x must ascend."""
    kept: list[int] = []
    for place in range(len(x)):
        while len(kept) > 1:
            a, b = kept[-2], kept[-1]
            if (y[b] - y[a]) * (x[place] - x[a]) < (y[place] - y[a]) * (x[b] - x[a]):
                break
            kept.pop()
        kept.append(place)
    return kept
