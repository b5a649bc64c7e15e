"""When which rank of a simulated pipeline fails, and how."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from ...conf.simulation import FaultsConfig


@dataclass(frozen=True, slots=True)
class RankFault:
    """A rank's process ends, or the rank hangs, `at` a time in seconds on the pipeline's clock."""

    at: float
    rank: int
    hangs: bool


def draw_faults(config: FaultsConfig, num_ranks: int, *, seed: int, replica: int = 0) -> Iterator[RankFault]:
    """Yield the faults of a replica's ranks in the order of their times, without end where they are drawn.

    Each rank fails by a Poisson process, also while the pipeline is repaired. With one seed the faults of a shorter
    mean time are the same ones, closer together.
    """
    draw = random.Random(f"faults {seed}")

    def fault(at: float) -> RankFault:
        return RankFault(at, draw.randrange(num_ranks), draw.random() < config.hang_share)

    if config.rank_mtbf_s is None:
        yield from map(fault, sorted(config.at or ()) if replica == 0 else ())
        return
    at = 0.0
    while True:
        at += draw.expovariate(1.0) * config.rank_mtbf_s / num_ranks
        yield fault(at)
