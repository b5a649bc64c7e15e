"""Measures the iterations of a stage by operator, in the form in which the cost model predicts them."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import torch

from gapless.models.stage import Stage
from gapless.runtime.cost.operators import LAYER_LINEARS
from gapless.runtime.cost.stage_costs import MicroBatchShape
from gapless.runtime.profiling.probe import Probe

from .model import batch_of, slots_of
from .timing import repeated

OF_A_LAYER = (*LAYER_LINEARS, "attn", "others")
OF_A_STAGE = ("embedding", "step", "head")


class MeasuredTimes:
    """The seconds of a stage's iterations, each shape measured when it is first asked for.

    They stand for a model of `num_layers` layers: a layer's operators count that many times, however many layers the
    stage holds. All layers compute all rows, as in the paper, and the LM head the rows that sample.

    Args:
        stage: It gets hooks, which stay.
        num_layers: Layers of the model.
    """

    def __init__(self, stage: Stage, num_layers: int) -> None:
        self._stage = stage
        self._num_layers = num_layers
        self._slots = stage.cache.scratch_slot  # the first that no request owns
        self._found: dict[tuple[object, ...], dict[str, float]] = {}
        self._sampled: torch.Tensor | None = None
        if stage.final_norm is not None:
            stage.final_norm.register_forward_pre_hook(self._keep_sampled)
        self._probe = Probe(stage)

    def _keep_sampled(self, _: object, args: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
        return tuple(None if part is None else part[self._sampled] for part in args)

    def fits(self, shape: MicroBatchShape) -> bool:
        """Return whether the KV cache holds the requests of a shape."""
        return slots_of(shape) <= self._slots

    def seconds(self, shape: MicroBatchShape) -> list[float]:
        """Return the seconds of an iteration, as a list of one stage."""
        return [sum(self.breakdown(shape, 0).values())]

    def breakdown(self, shape: MicroBatchShape, stage: int = 0) -> dict[str, float]:
        """Return the seconds by operator, all layers together; they add up to the iteration's.

        Raises:
            ValueError: The KV cache is too small.
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
