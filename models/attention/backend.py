"""Base class of attention backends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..batch import RaggedBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSizes:
    """Sizes, types and device of an attention computation.

    Attributes:
        block_size: slots per KV-cache block.
        num_blocks: blocks of the KV cache.
        head_dim: D, of queries and keys.
        window: a token attends to itself and the window - 1 tokens before it; None: to all tokens before it.
        dtype: dtype of the queries, and of the cache if `cache_dtype` is auto.
        cache_dtype: `cache.dtype`.
    """

    block_size: int
    num_blocks: int = 0
    head_dim: int = 0
    window: int | None = None
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")  # noqa: RUF009
    cache_dtype: str = "auto"

    def first_key(self, position: int) -> int:
        """Return the first position that a query at `position` attends to."""
        return 0 if self.window is None else max(0, position - self.window + 1)


class AttentionBackend:
    """Computes causal attention of a ragged batch over the paged KV cache, separately for chunks and for decodes.

    `about` is one line: the backend's name and why it was chosen; empty on a CPU.
    """

    def __init__(self, sizes: AttentionSizes) -> None:
        self.about = ""
        self.sizes = sizes

    def plan(self, batch: RaggedBatch) -> Any:
        """Compute the slots and masks that all layers share. Called once per micro-batch."""
        raise NotImplementedError

    def attend(self, q_TKGD: Tensor, keys_SKD: Tensor, values_SKD: Tensor, plan: Any) -> Tensor:
        """Compute one layer's attention: queries [T, K, G, D], with G query heads per KV head, to [T, K * G * D].

        The keys and values of this batch must be in the cache already.
        """
        raise NotImplementedError

    def fixed_plans(self, max_rows: int, max_keys: int, scratch_block: int) -> Any:
        """Make `FixedFlashPlans` for up to `max_rows` decodes over up to `max_keys` keys each; None: not supported.

        Padding rows read a key of `scratch_block`, which no request owns.
        """
        return None
