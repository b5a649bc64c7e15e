"""Inputs of a micro-batch that the layers of a stage share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class BatchContext:
    """The inputs of a micro-batch that the layers of a stage share. The model's last layer may have its own."""

    slots: Tensor  # [T] the KV slot that each token is written to
    rope: tuple[Tensor, Tensor] | None  # cosines and sines
    plan: Any  # the attention backend's plan for the computed rows
    rows: Tensor | None = None  # [R] rows whose attention and feed-forward are computed; None: all T

    @property
    def is_empty(self) -> bool:
        """Whether the layer only writes keys and values, and computes no rows."""
        return self.rows is not None and not len(self.rows)
