"""Stage costs whose slow stages reach a share of what their machines give."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..core.stage_floor import StageFloor
from ..cost.floor import floor_seconds
from ..cost.stage_costs import MicroBatchShape, StageCosts


class RatedCosts(StageCosts):
    """Stage costs, but some stages take no longer than at a share of their machines' rates.

    Args:
        costs: of the run.
        floors: of each stage.
        stages: that are slow.
        reached: share of the nearer rate, GEMM or memory, in (0, 1].
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
