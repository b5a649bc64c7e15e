"""Least squares with weights that are not negative, as times of work are."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_RIDGE = 1e-9  # share of the normal equations' diagonal


def non_negative(gram: npt.NDArray[np.float64], moment: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the non-negative least squares solution of each system of normal equations, [S, n].

    Parts that would be negative are left out, the most negative first. `gram` is [S, n, n], `moment` [S, n].
    """
    stages, n = moment.shape
    kept = np.diagonal(gram, axis1=1, axis2=2) > 0.0
    solution = np.zeros((stages, n))
    todo = np.arange(stages)
    for _ in range(n + 1):
        mask = kept[todo]
        # The equation of a part that is left out says that it is 0. A little ridge decides between parts that always
        # occurred together.
        both = mask[:, :, None] & mask[:, None, :]
        ridge = _RIDGE * np.where(mask, np.diagonal(gram[todo], axis1=1, axis2=2), 1.0 / _RIDGE)
        system = np.where(both, gram[todo], 0.0) + ridge[:, :, None] * np.eye(n)
        found = np.linalg.solve(system, np.where(mask, moment[todo], 0.0)[:, :, None])[:, :, 0]
        solution[todo] = found
        negative = (found < 0.0).any(axis=1)
        if not negative.any():
            break
        kept[todo[negative], found[negative].argmin(axis=1)] = False
        todo = todo[negative]
    return np.maximum(solution, 0.0)
