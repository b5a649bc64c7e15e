"""Bounds on the time of micro-batches of sizes absent from a run."""

from __future__ import annotations

from bisect import bisect_left
from typing import Literal

from ...simulation.cost.stage_costs import MicroBatchShape, StageCosts
from .observations import SizesShown


class BoundedCosts(StageCosts):
    """Learned stage costs, but lower or upper bounds for numbers of rows that the run has not shown.

    Few rows take constant time, bound by reading weights; many take time proportional to the rows. So the time is
    convex in the rows and at most proportional. Between two shown numbers of rows it is below linear interpolation and
    above both bounds of a roofline. Beyond the largest shown it is above linear extrapolation and below
    proportionality.
    """

    def __init__(self, costs: StageCosts, shown: SizesShown, bound: Literal["shortest", "longest"]) -> None:
        super().__init__(costs.layers, costs.operators)
        self._learned = costs
        self._shown = shown.rows
        self._longest = bound == "longest"

    def seconds(self, shape: MicroBatchShape) -> list[float]:
        """Return the seconds of each stage: a bound for numbers of rows that the run has not shown."""
        times = self._learned.seconds(shape)
        rows, known = shape.rows, self._shown
        place = bisect_left(known, rows)
        if place == 0 or (place < len(known) and known[place] == rows):  # below the smallest, or shown
            return times
        low = known[place - 1]
        of_low = self._of(shape, low)
        if place == len(known):
            if self._longest:
                return [max(seconds, rows / low * at) for seconds, at in zip(times, of_low, strict=True)]
            of_half = self._of(shape, low / 2)
            lines = (at + 2 * (rows / low - 1) * (at - half) for at, half in zip(of_low, of_half, strict=True))
            return [min(seconds, max(at, line)) for seconds, at, line in zip(times, of_low, lines, strict=True)]
        high = known[place]
        ends = list(zip(times, of_low, self._of(shape, high), strict=True))
        if self._longest:
            share = (rows - low) / (high - low)
            return [max(seconds, (1 - share) * below + share * above) for seconds, below, above in ends]
        return [min(seconds, max(below, above * rows / high)) for seconds, below, above in ends]

    def _of(self, shape: MicroBatchShape, rows: float) -> list[float]:
        """Return the seconds of a micro-batch scaled to `rows`, with the same mix."""
        share = rows / shape.rows
        chunks = [(max(1, round(share * length)), prefix) for length, prefix in shape.chunks]
        decodes, context, sampled, ended = (
            round(share * count) for count in (shape.decodes, shape.context, shape.sampled, shape.ended)
        )
        total = decodes + sum(length for length, _ in chunks)
        return self._learned.seconds(MicroBatchShape(chunks, decodes, context, min(max(1, sampled), total), ended))
