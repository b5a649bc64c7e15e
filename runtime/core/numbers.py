"""Whether a text is a number, and the lower envelope of points."""

from __future__ import annotations

from collections.abc import Sequence


def is_number(text: str) -> bool:
    """Return whether `float` reads the text."""
    try:
        float(text)
    except ValueError:
        return False
    return True


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
