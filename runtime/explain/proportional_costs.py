"""The longest that micro-batches beyond the sizes of a run may take."""

from __future__ import annotations

from ..cost.stage_costs import MicroBatchShape, StageCosts
from .learned_costs import SizesShown


class ProportionalCosts(StageCosts):
    """Stage costs that grow at least with the rows, where there are more than a run has shown.

    What a run has shown of few rows may be the time to read weights, which more rows share. Their own time, as soon as
    arithmetic bounds it, is proportional to them, and no more than that.
    """

    def __init__(self, costs: StageCosts, shown: SizesShown) -> None:
        super().__init__(costs.layers, costs.operators)
        self._learned = costs
        self._most = shown.rows

    def seconds(self, shape: MicroBatchShape) -> list[float]:
        times = self._learned.seconds(shape)
        rows = shape.rows
        if rows <= self._most:
            return times
        scale = rows / self._most
        of_most = self._learned.seconds(_shrunk(shape, self._most))
        return [max(seconds, scale * least) for seconds, least in zip(times, of_most, strict=True)]


def _shrunk(shape: MicroBatchShape, rows: int) -> MicroBatchShape:
    """Return a micro-batch with fewer rows, its parts in the same proportion."""
    share = rows / shape.rows
    chunks = [(max(1, round(share * length)), prefix) for length, prefix in shape.chunks]
    decodes, context, sampled, ended = (
        round(share * count) for count in (shape.decodes, shape.context, shape.sampled, shape.ended)
    )
    return MicroBatchShape(chunks, decodes, context, min(max(1, sampled), rows), ended)
