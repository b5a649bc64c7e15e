"""The paged KV cache of one rank: the keys and values of its layers, stored in blocks that requests own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .batch import RaggedBatch
from .cache_rows import empty_rows


class KVCache:
    """Keys and values by layer, each [S, K, D], where S is the number of slots.

    The token at `offset` in `block` has the slot block * block_size + offset. The memory is not initialized: slots that
    were never written must not be read. Beyond the blocks that requests may own lies one more, for rows that only pad a
    micro-batch: all of them are written to `scratch_slot`, and nothing reads it.

    Args:
        places: by layer which of the tensors holds its keys, and its values. Layers of different groups share one, and
            lie in blocks of their own (`models/block_groups.py`).
        num_blocks: those that requests may own.
        cache_dtype: `cache.dtype`. In 8 bits a row is longer than D, since its scale is part of it
            (`models/cache_rows.py`): whatever moves or keeps rows has their scales too.
        has_values: there are values apart from keys; false: what is cached as keys stands for both.
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


def slots_of(blocks: Sequence[int] | np.ndarray, first: int, last: int, block_size: int) -> range | np.ndarray:
    """Return the slots of positions first .. last-1 of a request, as a range where its blocks are consecutive."""
    lo, hi = first // block_size, -(-last // block_size)
    assert hi <= len(blocks), (last, block_size, len(blocks))
    owned, offset = np.asarray(blocks[lo:hi], dtype=np.int64), first % block_size
    if (np.diff(owned) == 1).all():
        start = int(owned[0]) * block_size + offset
        return range(start, start + last - first)
    slots = owned[:, None] * block_size + np.arange(block_size)
    return slots.reshape(-1)[offset : offset + last - first]


def slot_mapping(batch: RaggedBatch, block_size: int) -> np.ndarray:
    """Return the slot that each token's key and value are written to, [T] int64."""
    parts = [np.asarray(slots_of(c.blocks, c.start, c.context, block_size), dtype=np.int64) for c in batch.chunks]
    starts, tables = batch.decodes.starts, batch.decodes.tables
    blocks = tables[np.arange(len(starts)), starts // block_size].astype(np.int64) if len(starts) else starts
    return np.concatenate([*parts, blocks * block_size + starts % block_size])


def positions(batch: RaggedBatch) -> np.ndarray:
    """Return the position of each token in its request, [T] int64."""
    chunks = [np.arange(chunk.start, chunk.context, dtype=np.int64) for chunk in batch.chunks]
    return np.concatenate([*chunks, batch.decodes.starts])
