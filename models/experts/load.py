"""Expert load balance of a stage's micro-batches."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from torch import nn

from .block import Experts


class ExpertLoad:
    """Counts the tokens per expert in the layers of a rank. Does nothing on CUDA, to avoid a device synchronization.

    Args:
        layers: layer indices.
        decoder: the layers; some may have experts.
    """

    def __init__(self, layers: range, decoder: Iterable[nn.Module]) -> None:
        numbered = zip(layers, decoder, strict=True)
        self._blocks = [(i, each) for i, layer in numbered for each in layer.modules() if isinstance(each, Experts)]

    def read(self) -> tuple[float, int, int] | tuple[()]:
        """Return `expert_load`, `hot_layer` and `hot_expert` of a `Span`, for the last micro-batch."""
        most = mean = hottest = 0.0
        layer = expert = 0
        for number, block in self._blocks:
            if block.picked is None or not block.picked.numel():
                continue
            counts = np.bincount(block.picked.numpy().ravel(), minlength=block.num_experts)
            place = int(counts.argmax())
            most, mean = most + counts[place], mean + counts.sum() / len(counts)
            if counts[place] > hottest:
                hottest, layer, expert = float(counts[place]), number, place
        return (float(most / mean), layer, expert) if mean else ()
