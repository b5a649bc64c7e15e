"""Stage costs with slow stages raised to a share of their machines' rates."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from ...core.micro_batch_sizes import Sizes
from ...core.stage_floor import StageFloor
from ...simulation.cost.stage_costs import MicroBatchShape, StageCosts


class RatedCosts(StageCosts):
    """Stage costs in which slow stages reach at least a given share of their machines' peak rates.

    Args:
        costs: the run's costs.
        floors: each stage's floor.
        stages: the slow stages.
        reached: share of the binding rate, GEMM or memory, in (0, 1].
    """

    def __init__(
        self, costs: StageCosts, floors: Sequence[StageFloor], stages: Collection[int], reached: float
    ) -> None:
        super().__init__(costs.layers, costs.operators)
        self._costs, self._floors, self._slow, self._reached = costs, floors, frozenset(stages), reached

    def seconds(self, shape: MicroBatchShape) -> list[float]:
        """Return the seconds of each stage."""
        floors = floor_seconds(self._floors, shape)
        return [
            min(seconds, floor / self._reached) if stage in self._slow else seconds
            for stage, (seconds, floor) in enumerate(zip(self._costs.seconds(shape), floors, strict=True))
        ]


def floor_seconds(floors: Sequence[StageFloor], shape: MicroBatchShape) -> list[float]:
    """Return the roofline seconds of each stage for a micro-batch: by FLOPs or by bytes, whichever is longer."""
    each, decodes = np.array([shape.context / max(1, shape.decodes)]), np.array([float(shape.decodes)])
    sizes = Sizes([shape.chunks], [1], each, decodes, [shape.sampled], [1.0])
    return [
        max(float(sizes.flops(each)[0]) / each.flops_per_s, float(sizes.bytes(each)[0]) / each.bytes_per_s)
        for each in floors
    ]
