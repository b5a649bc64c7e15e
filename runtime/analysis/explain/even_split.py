"""The layer split that balances a run's stages, by the stage times of its own micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ....conf.errors import ConfigError
from ...core.run_record import MicroBatchRecord
from ...simulation.cost.stage_costs import MicroBatchShape, StageCosts
from ...simulation.pipeline.setting import Setting
from .changes import Change

_MOST_SHAPES = 64  # micro-batches used to compare splits
_LEAST_GAIN = 0.005  # share of the slowest stage's time that moving a layer must save


def even_split(
    setting: Setting, changed: Callable[[Mapping[str, Any]], Setting], micro_batches: Sequence[MicroBatchRecord]
) -> Change | None:
    """Return the change of `parallel.layers` that makes the slowest stage fastest; None if moving layers does not help.

    Layers move one by one from the slowest stage to the fastest.

    Args:
        setting: the run's setting.
        changed: returns the setting with some keys changed, like `Twin.changed`.
        micro_batches: the run's; some of them are timed.
    """
    if len(setting.plan.layers) < 2:
        return None
    shapes = some_shapes(micro_batches)
    begun = counts = [len(layers) for layers in setting.plan.layers]
    seconds = mean_seconds(setting.costs, shapes)
    for _ in range(sum(counts)):
        slowest, fastest = seconds.index(max(seconds)), seconds.index(min(seconds))
        if counts[slowest] < 2 or slowest == fastest:
            break
        moved = list(counts)
        moved[slowest] -= 1
        moved[fastest] += 1
        try:
            after = mean_seconds(changed({"parallel.layers": moved}).costs, shapes)
        except ConfigError:  # the receiving stage has not enough memory
            break
        if max(after) > (1 - _LEAST_GAIN) * max(seconds):
            break
        counts, seconds = moved, after
    return Change("split", {"parallel.layers": counts}) if counts != begun else None


def some_shapes(micro_batches: Sequence[MicroBatchRecord]) -> list[MicroBatchShape]:
    """Return the shapes of a sample of micro-batches, evenly spaced over the run, to compare its stages."""
    return [MicroBatchShape.of_record(each) for each in micro_batches[:: -(-len(micro_batches) // _MOST_SHAPES)]]


def mean_seconds(costs: StageCosts, shapes: Sequence[MicroBatchShape]) -> list[float]:
    """Return the mean seconds per micro-batch of each stage, over `shapes`."""
    totals = [0.0] * costs.num_stages
    for shape in shapes:
        totals = [total + seconds for total, seconds in zip(totals, costs.seconds(shape), strict=True)]
    return [total / max(1, len(shapes)) for total in totals]
