"""How much a number of a run varies from run to run, by its repeats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..core.student import t_quantile

_OUTSIDE = 0.1  # of pairs of equal runs that differ by more than chance is taken to


@dataclass(frozen=True, slots=True)
class Noise:
    """The ranges in which a number of the base run and of the other lies by chance.

    They overlap where the difference of the two is one that nine of ten pairs of equal runs stay within.
    """

    base: tuple[float, float]
    run: tuple[float, float]

    @property
    def covers(self) -> bool:
        """Whether the ranges overlap, so that the difference may be chance."""
        return self.base[0] <= self.run[1] and self.run[0] <= self.base[1]


def noise_by_repeats(base: float, run: float, repeats: Sequence[Sequence[float]]) -> Noise | None:
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
    half = t_quantile(_OUTSIDE, freedom) * float(np.sqrt(squares / freedom / 2))
    return Noise((base - half, base + half), (run - half, run + half))
