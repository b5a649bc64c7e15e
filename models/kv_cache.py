"""The paged KV cache of one rank: the keys and values of its layers, in blocks owned by requests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..kernels.cache_rows import CACHE_DTYPES
from .batch import RaggedBatch
from .memory import kv_row_width


class KVCache:
    """Keys and values by layer, each [S, K, D] with S slots.

    The token at `offset` in `block` has the slot block * block_size + offset. The memory is not initialized: slots that
    were never written must not be read. One extra block is for padding rows of a micro-batch: they all write to
    `scratch_slot`, which is never read.

    Args:
        places: per layer, the index of its key and value tensors. Layers of different groups share a tensor, in
            separate blocks (`models/block_groups.py`).
        num_blocks: number of blocks that requests may own.
        cache_dtype: `cache.dtype`. An 8-bit row is longer than D, since it includes its scale
            (`kernels/cache_rows.py`): moving or saving a row includes the scale.
        has_values: values are cached separately from keys; false (MLA): `values` are the same tensors as `keys`.
    """

    def __init__(
        self,
        *,
        places: Sequence[int],
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        cache_dtype: str = "auto",
        has_values: bool = True,
    ) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks + 1
        self.scratch_slot = num_blocks * block_size
        num_slots = self.num_blocks * block_size

        def empty() -> torch.Tensor:
            return empty_rows(num_kv_heads, num_slots, head_dim, dtype=dtype, cache_dtype=cache_dtype, device=device)

        kept = range(max(places, default=-1) + 1)
        keys = [empty() for _ in kept]
        values = [empty() for _ in kept] if has_values else keys
        self.keys = [keys[place] for place in places]
        self.values = [values[place] for place in places]


def empty_rows(
    num_kv_heads: int, num_slots: int, head_dim: int, *, dtype: torch.dtype, cache_dtype: str, device: torch.device
) -> Tensor:
    """Make an uninitialized cache of keys or values, [S, K, D], or [S, K, width] for 8-bit rows."""
    stored = CACHE_DTYPES.get(cache_dtype, dtype)
    width = kv_row_width(head_dim, cache_dtype)
    if device.type == "cpu":
        # A head's keys are contiguous in memory, which makes memory-bound decodes twice as fast.
        return torch.empty(num_kv_heads, num_slots, width, dtype=stored, device=device).transpose(0, 1)
    return torch.empty(num_slots, num_kv_heads, width, dtype=stored, device=device)


def slots_of(blocks: Sequence[int] | np.ndarray, first: int, last: int, block_size: int) -> range | np.ndarray:
    """Return the slots of positions first .. last-1 of a request, as a range if its blocks are consecutive."""
    lo, hi = first // block_size, -(-last // block_size)
    assert hi <= len(blocks), (last, block_size, len(blocks))
    owned, offset = np.asarray(blocks[lo:hi], dtype=np.int64), first % block_size
    if (np.diff(owned) == 1).all():
        start = int(owned[0]) * block_size + offset
        return range(start, start + last - first)
    slots = owned[:, None] * block_size + np.arange(block_size)
    return slots.reshape(-1)[offset : offset + last - first]


def slot_mapping(batch: RaggedBatch, block_size: int) -> np.ndarray:
    """Return the KV slot to write for each token, [T] int64."""
    parts = [np.asarray(slots_of(c.blocks, c.start, c.context, block_size), dtype=np.int64) for c in batch.chunks]
    starts, tables = batch.decodes.starts, batch.decodes.tables
    blocks = tables[np.arange(len(starts)), starts // block_size].astype(np.int64) if len(starts) else starts
    return np.concatenate([*parts, blocks * block_size + starts % block_size])


def positions(batch: RaggedBatch) -> np.ndarray:
    """Return the position of each token in its request, [T] int64."""
    chunks = [np.arange(chunk.start, chunk.context, dtype=np.int64) for chunk in batch.chunks]
    return np.concatenate([*chunks, batch.decodes.starts])
