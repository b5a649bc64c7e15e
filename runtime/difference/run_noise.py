"""How much a number of a run varies from run to run: by its repeats, or else by the scatter within it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..core.micro_batch_columns import Floats
from ..core.student import t_quantile
from ..ledger.fleet import Fleet
from .difference import compute_rows

_PIECES = 8  # of a run
# Half the range of one run in standard deviations: ranges of two as noisy ones overlap where their difference is within
# 1.645 of its own.
_HALF = 1.645 / np.sqrt(2)


@dataclass(frozen=True, slots=True)
class Noise:
    """The ranges in which a number of the base run and of the other lies by chance.

    They overlap where the difference of the two is one that nine of ten pairs of equal runs stay within.
    """

    base: tuple[float, float]
    run: tuple[float, float]
    repeats: tuple[int, int]  # of each; (1, 1): by the scatter within the runs

    @property
    def covers(self) -> bool:
        """Whether the ranges overlap, so that the difference may be chance."""
        return self.base[0] <= self.run[1] and self.run[0] <= self.base[1]


def noise_by_repeats(base: float, run: float, repeats: tuple[Sequence[float], Sequence[float]]) -> Noise | None:
    """Return the noise of a number, as the repeats of both runs scatter around their means; None where neither has any.

    Args:
        base: the number in the base run.
        run: the same in the other.
        repeats: the number in all repeats of each, those among them.
    """
    freedom = sum(len(values) - 1 for values in repeats)
    if not freedom:
        return None
    squares = sum(float(np.square(np.array(values) - np.mean(values)).sum()) for values in repeats)
    half = float(t_quantile(0.1, freedom) / np.sqrt(2) * np.sqrt(squares / freedom))
    counts = (len(repeats[0]), len(repeats[1]))
    return Noise((base - half, base + half), (run - half, run + half), counts)


def makespan_range(fleet: Fleet, weights: Floats) -> tuple[float, float]:
    """Return the range of a run's makespan.

    It is as if a run were as much slower or faster than another one as its eighths are than each other.

    Args:
        fleet: the run.
        weights: seconds of each feature over all stages: what the micro-batches of an eighth should take.
    """
    rows, seconds = compute_rows(fleet)
    foreseen = rows @ weights
    took = (seconds > 0) & (foreseen > 0)
    if took.sum() < 2 * _PIECES:
        return fleet.span_seconds, fleet.span_seconds
    pieces = np.arange(int(took.sum())) * _PIECES // int(took.sum())
    ratio = np.bincount(pieces, seconds[took]) / np.bincount(pieces, foreseen[took])
    half = float(_HALF * ratio.std(ddof=1) / ratio.mean()) * fleet.span_seconds
    return fleet.span_seconds - half, fleet.span_seconds + half
