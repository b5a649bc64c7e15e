"""The shortest and the longest that micro-batches of sizes that a run has not shown may take."""

from __future__ import annotations

from bisect import bisect_left
from typing import Literal

from ..cost.stage_costs import MicroBatchShape, StageCosts
from .observations import SizesShown


class BoundedCosts(StageCosts):
    """Learned stage costs, but the shortest or longest times of numbers of rows that a run has not shown.

    Few rows take the time to read weights, however many they are; more take a time that is proportional to them. So the
    time of rows is convex and at most proportional. Between two numbers that the run has shown it lies below the
    straight line, and above both bounds of a roofline. Beyond the most it lies above the line of those that the run has
    shown, and below proportion.
    """

    def __init__(self, costs: StageCosts, shown: SizesShown, bound: Literal["shortest", "longest"]) -> None:
        super().__init__(costs.layers, costs.operators)
        self._learned = costs
        self._shown = shown.rows
        self._longest = bound == "longest"

    def seconds(self, shape: MicroBatchShape) -> list[float]:
        """Return the seconds of each stage: for numbers of rows that the run has not shown, a bound of them."""
        times = self._learned.seconds(shape)
        rows, known = shape.rows, self._shown
        place = bisect_left(known, rows)
        if place == 0 or (place < len(known) and known[place] == rows):  # fewer than any, or shown
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
        """Return the seconds of a micro-batch of `rows`, its parts in the same proportion."""
        share = rows / shape.rows
        chunks = [(max(1, round(share * length)), prefix) for length, prefix in shape.chunks]
        decodes, context, sampled, ended = (
            round(share * count) for count in (shape.decodes, shape.context, shape.sampled, shape.ended)
        )
        total = decodes + sum(length for length, _ in chunks)
        return self._learned.seconds(MicroBatchShape(chunks, decodes, context, min(max(1, sampled), total), ended))
