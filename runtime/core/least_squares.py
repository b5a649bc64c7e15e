"""Non-negative least squares (NNLS)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_RIDGE = 1e-9  # relative to the diagonal; breaks ties between collinear features
_TOLERANCE = 1e-10


def non_negative(gram: npt.NDArray[np.float64], moment: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the x >= 0 that minimizes x'Gx - 2 m'x for each system, by Lawson and Hanson's active-set method.

    Args:
        gram: G of [..., n, n], symmetric positive semidefinite.
        moment: m of [..., n].
    """
    shape, n = moment.shape, moment.shape[-1]
    scale = np.sqrt(np.maximum(np.diagonal(gram, axis1=-2, axis2=-1), 1e-300)).reshape(-1, n)
    gram = gram.reshape(-1, n, n) / scale[:, :, None] / scale[:, None, :] + _RIDGE * np.eye(n)
    moment = moment.reshape(-1, n) / scale
    tolerance = _TOLERANCE * np.maximum(1.0, np.abs(moment).max(axis=1))
    x = np.maximum(moment, 0.0)
    free, systems = x > 0.0, np.arange(len(x))
    for _ in range(4 * n):
        found = np.linalg.solve(
            np.where(free[:, :, None] & free[:, None, :], gram, np.eye(n)), np.where(free, moment, 0.0)[:, :, None]
        )[:, :, 0]
        negative = free & (found <= 0.0)
        blocked = negative.any(axis=1)
        # Step towards the minimum over the free variables until the first of them reaches 0, and fix that one at 0.
        room = np.where(negative, x / np.maximum(x - found, 1e-300), np.inf)
        x += np.where(blocked, room.min(axis=1), 1.0)[:, None] * (found - x)
        free[systems[blocked], room.argmin(axis=1)[blocked]] = False
        free &= x > 0.0
        x = np.where(free, x, 0.0)
        # At that minimum, free the variable with the steepest descent.
        slope = np.where(free, -np.inf, moment - (gram @ x[:, :, None])[:, :, 0])
        enters = ~blocked & (slope.max(axis=1) > tolerance)
        free[systems[enters], slope.argmax(axis=1)[enters]] = True
        if not (blocked | enters).any():
            break
    return np.asarray(x / scale, np.float64).reshape(shape)
