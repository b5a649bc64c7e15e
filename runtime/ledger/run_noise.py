"""How much a number of a run varies from run to run: by its repeats, or else by the scatter within it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..core.micro_batch_columns import Floats
from .difference import compute_rows
from .fleet import Fleet

_PIECES = 8  # of a run
# Half the range of one run in standard deviations: ranges of two as noisy ones overlap where their difference is within
# 1.645 of its own.
_HALF = 1.645 / np.sqrt(2)


@dataclass(frozen=True, slots=True)
class Noise:
    """The ranges in which a number of the base run and of the other lies by chance."""

    base: tuple[float, float]
    run: tuple[float, float]
    repeats: tuple[int, int]  # runs that each range is of; 1: by the scatter within the run

    @property
    def covers(self) -> bool:
        """Whether the ranges overlap, so that the difference may be chance."""
        return self.base[0] <= self.run[1] and self.run[0] <= self.base[1]


def noise_of(
    base: Sequence[float], run: Sequence[float], base_range: tuple[float, float], run_range: tuple[float, float]
) -> Noise:
    """The noise of a number.

    Args:
        base: the number in each repeat of the base run, at least one; `run` likewise.
        base_range: what the scatter within the run says, for where there is one; `run_range` likewise.
    """
    found = []
    for values, other, within in ((base, run, base_range), (run, base, run_range)):
        if len(values) > 1:
            found.append((min(values), max(values)))
        elif len(other) > 1:  # as wide as the other's
            half = (max(other) - min(other)) / 2
            found.append((values[0] - half, values[0] + half))
        else:
            found.append(within)
    return Noise(found[0], found[1], (len(base), len(run)))


def makespan_range(fleet: Fleet, weights: Floats) -> tuple[float, float]:
    """The range of a run's makespan, as if a run were as much slower or faster than another one as its eighths are than
    each other.

    Args:
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
