"""Least squares whose solution has no negative part."""

from __future__ import annotations

import numpy as np

from ..core.micro_batch_columns import Floats

_RIDGE = 1e-9  # share of the diagonal, which decides between parts that always occurred together
_TOLERANCE = 1e-10


def non_negative_least_squares(gram: Floats, moment: Floats) -> Floats:
    """Return the x >= 0 of [n] that minimizes x'Gx - 2 m'x, by Lawson and Hanson's active sets.

    Args:
        gram: G of [n, n], symmetric and not negative.
        moment: m of [n].
    """
    scale = np.sqrt(np.maximum(np.diagonal(gram), 1e-300))
    gram = gram / scale[:, None] / scale + _RIDGE * np.eye(len(moment))
    moment = moment / scale
    x = np.zeros(len(moment))
    free = np.zeros(len(moment), bool)
    for _ in range(3 * len(moment)):
        slope = np.where(free, -np.inf, moment - gram @ x)
        entering = int(slope.argmax())
        if slope[entering] <= _TOLERANCE * max(1.0, float(np.abs(moment).max())):
            break
        free[entering] = True
        while True:
            found = np.zeros(len(moment))
            found[free] = np.linalg.solve(gram[np.ix_(free, free)], moment[free])
            negative = free & (found <= 0)
            if not negative.any():
                x = found
                break
            step = (x[negative] / np.maximum(x[negative] - found[negative], 1e-300)).min()
            x = x + step * (found - x)
            free &= x > 1e-15
            x[~free] = 0.0
    return np.asarray(x / scale, np.float64)
