"""What the layers of a stage share of a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class BatchContext:
    """The inputs of a micro-batch that all layers of a stage share, or those of the last layer of all."""

    slots: Tensor  # [T] the KV slot that each token is written to
    rope: tuple[Tensor, Tensor] | None  # cosines and sines
    plan: Any  # of the rows whose attention is computed, from the attention backend
    rows: Tensor | None = None  # [R] the only ones whose attention and feed-forward are computed; None: all T

    @property
    def is_empty(self) -> bool:
        """Whether the layer computes no row, and only writes keys and values."""
        return self.rows is not None and not len(self.rows)
