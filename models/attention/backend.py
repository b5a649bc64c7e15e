"""The seam between a decoder layer and how attention is computed."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from ..batch import RaggedBatch


class AttentionBackend(Protocol):
    """Causal attention of a ragged batch over the paged cache, chunks and decodes apart.

    `plan` is called once a micro-batch and holds all that layers share (which slots, which masks); `attend` is called
    once a layer, after this batch's keys and values have been written.
    """

    def plan(self, batch: RaggedBatch) -> Any: ...

    def attend(
        self, q_TKGD: torch.Tensor, keys_SKD: torch.Tensor, values_SKD: torch.Tensor, plan: Any
    ) -> torch.Tensor:
        """[T, K, G, D] queries, G query heads a KV head -> [T, K * G * D]."""
        ...
