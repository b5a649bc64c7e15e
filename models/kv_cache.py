"""The paged KV cache of one rank: the keys and values of its layers, stored in blocks that requests own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .batch import RaggedBatch


class KVCache:
    """Keys and values by layer, each [S, K, D], where S = num_blocks * block_size is the number of slots.

    The token at `offset` in `block` has the slot block * block_size + offset. The memory is not initialized: slots that
    were never written must not be read.
    """

    def __init__(
        self, *, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int,
        dtype: torch.dtype, device: torch.device,
    ) -> None:
        self.block_size = block_size
        num_slots = num_blocks * block_size

        def empty() -> torch.Tensor:
            if device.type == "cpu":
                # A head's keys are contiguous in memory, which makes a decode twice as fast: reading them bounds it.
                return torch.empty(num_kv_heads, num_slots, head_dim, dtype=dtype, device=device).transpose(0, 1)
            return torch.empty(num_slots, num_kv_heads, head_dim, dtype=dtype, device=device)

        self.keys = [empty() for _ in range(num_layers)]
        self.values = [empty() for _ in range(num_layers)]


def slots_of(blocks: Sequence[int], first: int, last: int, block_size: int) -> range | np.ndarray:
    """Return the slots of positions first .. last-1 of a request, as a range where its blocks are consecutive."""
    lo, hi = first // block_size, -(-last // block_size)
    assert hi <= len(blocks), (last, block_size, len(blocks))
    base = blocks[lo]
    if hi - lo == 1 or list(blocks[lo:hi]) == list(range(base, base + hi - lo)):
        start = base * block_size + first - lo * block_size
        return range(start, start + last - first)
    owned = np.asarray(blocks[lo:hi], dtype=np.int64)
    slots = owned[:, None] * block_size + np.arange(block_size)
    return slots.reshape(-1)[first - lo * block_size : last - lo * block_size]


def slot_runs(blocks: Sequence[int], first: int, last: int, block_size: int) -> list[tuple[int, int]]:
    """Return the slots of positions first .. last-1 of a request as runs: a first slot, and how many follow on it."""
    lo, hi = first // block_size, -(-last // block_size)
    base = blocks[lo]
    if hi - lo == 1 or blocks[lo:hi] == list(range(base, base + hi - lo)):  # most requests; C compares the lists
        return [(base * block_size + first % block_size, last - first)]
    runs: list[tuple[int, int]] = []
    position = first
    while position < last:
        number = position // block_size
        begin = blocks[number] * block_size + position % block_size
        while number + 1 < len(blocks) and blocks[number + 1] == blocks[number] + 1:
            number += 1
        end = min(last, (number + 1) * block_size)
        runs.append((begin, end - position))
        position = end
    return runs


def slot_mapping(batch: RaggedBatch, block_size: int) -> np.ndarray:
    """Return the slot that each token's key and value are written to, [T] int64."""
    parts = [np.asarray(slots_of(c.blocks, c.start, c.context, block_size), dtype=np.int64) for c in batch.chunks]
    decodes = [d.blocks[d.start // block_size] * block_size + d.start % block_size for d in batch.decodes]
    return np.concatenate([*parts, np.asarray(decodes, dtype=np.int64)])


def positions(batch: RaggedBatch) -> np.ndarray:
    """Return the position of each token in its request, [T] int64."""
    parts = [np.arange(c.start, c.context, dtype=np.int64) for c in batch.chunks]
    return np.concatenate([*parts, np.asarray([d.start for d in batch.decodes], dtype=np.int64)])
