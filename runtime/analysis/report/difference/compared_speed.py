"""Separates changes of work from changes of speed between two runs, by a fit over the micro-batches of both."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ....core.least_squares import non_negative
from ....core.micro_batch_columns import Floats

# Alternating fits of work and speed, starting from equal speeds. If both runs have similar micro-batches, the first
# turn finds the speeds; if not, the contents of micro-batches explain as much as they can.
_TURNS = 4


@dataclass(frozen=True, slots=True)
class ComputeChange:
    """The change of compute seconds from one run to another, in two parts that sum to it.

    Attributes:
        work: change in seconds due to the number and contents of micro-batches.
        speed: change in seconds due to the same micro-batches being slower or faster.
        slowdown: time of a micro-batch in the second run over its time in the first.
    """

    work: float
    speed: float
    slowdown: float


def compare_compute(base: Floats, base_seconds: Floats, run: Floats, run_seconds: Floats) -> ComputeChange:
    """Separate work from speed.

    Args:
        base: features of the first run's micro-batches, [N, features].
        base_seconds: compute times of those micro-batches, [N].
        run: features of the second run's micro-batches, [M, features].
        run_seconds: compute times of those micro-batches, [M].
    """
    base, base_seconds = base[base_seconds > 0], base_seconds[base_seconds > 0]
    run, run_seconds = run[run_seconds > 0], run_seconds[run_seconds > 0]
    before, after = float(base_seconds.sum()), float(run_seconds.sum())
    if before <= 0 or after <= 0:  # one run computed nothing: the whole change is work
        return ComputeChange(after - before, 0.0, 1.0)
    slowdown = 1.0
    for _ in range(_TURNS):
        weights = _fit(base, base_seconds, run, run_seconds / slowdown)
        foreseen, foreseen_after = float(base.sum(axis=0) @ weights), float(run.sum(axis=0) @ weights)
        if foreseen <= 0 or foreseen_after <= 0:
            return ComputeChange(after - before, 0.0, 1.0)
        slowdown = (after / foreseen_after) / (before / foreseen)
    slow, slow_after = before / foreseen, after / foreseen_after
    work = (foreseen_after - foreseen) * (slow + slow_after) / 2
    return ComputeChange(work, after - before - work, slow_after / slow)


def _fit(base: Floats, base_seconds: Floats, run: Floats, run_seconds: Floats) -> Floats:
    """Return the non-negative weights that predict the seconds of both runs, by relative error.

    Both runs have equal weight.
    """
    parts = []
    for rows, seconds in ((base, base_seconds), (run, run_seconds)):
        weight = 1.0 / (seconds * np.sqrt(len(seconds)))
        parts.append((rows * weight[:, None], seconds * weight))
    rows, wanted = np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])
    scale = np.abs(rows).max(axis=0)
    scale[scale == 0.0] = 1.0
    rows = rows / scale
    return np.asarray(non_negative(rows.T @ rows, rows.T @ wanted) / scale, np.float64)
