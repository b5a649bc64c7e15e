"""What two runs computed against how fast they did: a fit over the micro-batches of both tells the two apart."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..core.least_squares import non_negative
from ..core.micro_batch_columns import Floats

# Fits of work and speed by turns, from equal speeds on. Where both runs have micro-batches alike, the first turn finds
# the speeds; where they have none, what they hold explains as much as it can.
_TURNS = 4


@dataclass(frozen=True, slots=True)
class ComputeChange:
    """The change of compute seconds from one run to another, in two parts that sum to it.

    Attributes:
        work: seconds by which it changed as the micro-batches held other tokens, or were more or fewer.
        speed: seconds by which it changed as the same micro-batches took longer or shorter.
        slowdown: how many times as long the same micro-batch takes in the second run.
        weights: seconds of each feature in the first run's time.
    """

    work: float
    speed: float
    slowdown: float
    weights: Floats


def compare_compute(base: Floats, base_seconds: Floats, run: Floats, run_seconds: Floats) -> ComputeChange:
    """Tell work from speed.

    Args:
        base: features of the first run's micro-batches, [N, features].
        base_seconds: what each took, [N].
        run: features of the second run's, [M, features].
        run_seconds: what each took, [M].
    """
    base, base_seconds = base[base_seconds > 0], base_seconds[base_seconds > 0]
    run, run_seconds = run[run_seconds > 0], run_seconds[run_seconds > 0]
    before, after = float(base_seconds.sum()), float(run_seconds.sum())
    if before <= 0 or after <= 0:  # one computed nothing: all of it is work
        return ComputeChange(after - before, 0.0, 1.0, np.zeros(base.shape[1]))
    slowdown = 1.0
    for _ in range(_TURNS):
        weights = _fit(base, base_seconds, run, run_seconds / slowdown)
        foreseen, foreseen_after = float(base.sum(axis=0) @ weights), float(run.sum(axis=0) @ weights)
        if foreseen <= 0 or foreseen_after <= 0:
            return ComputeChange(after - before, 0.0, 1.0, np.zeros(base.shape[1]))
        slowdown = (after / foreseen_after) / (before / foreseen)
    slow, slow_after = before / foreseen, after / foreseen_after
    work = (foreseen_after - foreseen) * (slow + slow_after) / 2
    return ComputeChange(work, after - before - work, slow_after / slow, weights * slow)


def _fit(base: Floats, base_seconds: Floats, run: Floats, run_seconds: Floats) -> Floats:
    """Return the weights of 0 or more that foretell the seconds of both runs, by relative error.

    Each run counts as much as the other.
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
