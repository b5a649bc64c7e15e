"""Measures a stage's iterations by operator, through the interface of the cost model."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import torch

from gapless.models.stage import Stage
from gapless.runtime.simulation.cost.operators import LAYER_LINEARS
from gapless.runtime.simulation.cost.stage_costs import MicroBatchShape
from gapless.runtime.simulation.profiling.probe import Probe

from .model import batch_of, slots_of
from .timing import repeated

OF_A_LAYER = (*LAYER_LINEARS, "attn", "others")
OF_A_STAGE = ("embedding", "step", "head")


class MeasuredTimes:
    """Seconds of a stage's iterations; each shape is measured on first use.

    They represent a model of `num_layers` layers: the operators of a layer count that many times, whatever the number
    of layers in the stage. All layers compute all rows, as in the paper, and the LM head the sampled rows.

    Args:
        stage: It gets permanent hooks.
        num_layers: Layers of the model.
    """

    def __init__(self, stage: Stage, num_layers: int) -> None:
        self._stage = stage
        self._num_layers = num_layers
        self._slots = stage.cache.scratch_slot  # the first that belongs to no request
        self._found: dict[tuple[object, ...], dict[str, float]] = {}
        self._sampled: torch.Tensor | None = None
        if stage.final_norm is not None:
            stage.final_norm.register_forward_pre_hook(self._keep_sampled)
        self._probe = Probe(stage)

    def _keep_sampled(self, _: object, args: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
        return tuple(None if part is None else part[self._sampled] for part in args)

    def fits(self, shape: MicroBatchShape) -> bool:
        """Return whether the requests of a shape fit into the KV cache."""
        return slots_of(shape) <= self._slots

    def seconds(self, shape: MicroBatchShape) -> list[float]:
        """Return the seconds of an iteration, as a list of one stage."""
        return [sum(self.breakdown(shape, 0).values())]

    def breakdown(self, shape: MicroBatchShape, stage: int = 0) -> dict[str, float]:
        """Return the seconds by operator over all layers; they sum to the iteration's time.

        Raises:
            ValueError: the KV cache is too small.
        """
        key = shape.chunks, shape.decodes, shape.context, shape.sampled
        if key not in self._found:
            self._found[key] = self._measure(shape)
        return self._found[key]

    def _measure(self, shape: MicroBatchShape) -> dict[str, float]:
        if not self.fits(shape):
            raise ValueError(f"{slots_of(shape)} KV slots do not fit the stage's {self._slots}")
        batch = batch_of(shape)
        inputs = self._stage.prepare(batch)
        inputs = replace(inputs, last_context=inputs.contexts[-1])
        self._sampled = torch.from_numpy(batch.sample_rows).to(self._stage.device)

        def compute() -> None:
            self._stage(inputs)

        compute()
        samples = repeated(lambda: self._probe.measure(compute))
        middle = {name: median(sample[name] for sample in samples) for name in (*OF_A_LAYER, *OF_A_STAGE)}
        layers = {name: self._num_layers * middle[name] for name in OF_A_LAYER}
        return layers | {name: middle[name] for name in OF_A_STAGE} | {"all_reduce": 0.0}
