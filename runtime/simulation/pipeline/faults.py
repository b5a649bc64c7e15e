"""Fault schedule of a simulated pipeline: which rank fails, when and how."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from ....conf.simulation import FaultsConfig


@dataclass(frozen=True, slots=True)
class RankFault:
    """A rank that exits or hangs; `at` is in seconds on the pipeline's clock."""

    at: float
    rank: int
    hangs: bool


def draw_faults(config: FaultsConfig, num_ranks: int, *, seed: int, replica: int = 0) -> Iterator[RankFault]:
    """Yield the faults of a replica's ranks in time order; unbounded if they are random.

    Random faults are a Poisson process per rank, which continues during repairs. With the same seed, a shorter MTBF
    gives the same faults, closer together.
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
