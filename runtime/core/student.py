"""Student's t quantiles, for small-sample confidence intervals."""

from __future__ import annotations

import math


def t_quantile(level: float, freedom: int) -> float:
    """Return the two-sided t quantile: |T| exceeds it with probability `level`."""
    assert 0.0 < level < 1.0
    low, high = 0.0, 1.0
    while _beyond(high, freedom) > level:
        high *= 2.0
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _beyond(middle, freedom) > level else (low, middle)
    return high


def _beyond(t: float, freedom: int) -> float:
    """Return the probability that |T| > t for Student's t (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine = math.cos(angle)
    odd = freedom % 2
    term, total = (cosine, cosine) if odd else (1.0, 1.0)
    if freedom == 1:
        total = 0.0
    for k in range(3 if odd else 2, freedom - 1, 2):
        term *= cosine**2 * (k - 1) / k
        total += term
    within = 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total
    return 1.0 - within
