"""Predicts the time of attention kernels, for prefill chunks and for decodes."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

import math
from collections.abc import Sequence

from ....conf.costs import AttentionConfig

_BLOCK_QUERIES = 64  # query rows per block
_BLOCKS_PER_MULTIPROCESSOR = 2  # concurrent
_MOST_SPLIT_WAVES = 0.5  # with fewer waves, which leave multiprocessors idle, decodes may split the keys
_NORM_ORDER = 4.0  # of the p-norm that combines the longest decode block's time with the memory time


class AttentionCost:
    """Predicts the time of one layer's attention on one rank.

    A kernel's work is divided into blocks. The multiprocessors run a fixed number of blocks at once: a wave. For
    chunks, a block is 64 queries of one head, which attend to all keys. For decodes, a block is one KV head of a
    request, whose keys and values are read once. If there are few blocks, kernels split the keys when that is faster
    (flash-decoding): several multiprocessors share a block, and their partial results are combined. So a longer chunk,
    a longer prefix, more decodes and longer contexts never take less time.

    Args:
        heads, kv_heads, head_dim: the rank's share of the model's heads, and their size.
        multiprocessors: number of multiprocessors of the device.
        dtype_bytes: bytes of an element. The config's rates are for 2 bytes; time grows in proportion.
        row_bytes: bytes of one token's key in one head, with its scale; 0: `head_dim` elements of `dtype_bytes`.
    """

    def __init__(
        self,
        config: AttentionConfig,
        heads: int,
        kv_heads: int,
        head_dim: int,
        multiprocessors: int,
        dtype_bytes: int,
        row_bytes: int = 0,
    ) -> None:
        self._wave_blocks = _BLOCKS_PER_MULTIPROCESSOR * multiprocessors
        self._heads, self._kv_heads = heads, kv_heads
        flops_per_key = 4 * _BLOCK_QUERIES * head_dim * self._wave_blocks  # per wave
        self._chunk_wave_per_key = flops_per_key / (config.chunk_tflops * 1e12) * dtype_bytes / 2
        self._self_share, self._chunk_spread = config.chunk_self, config.chunk_spread
        self.chunks_together = config.chunks_together
        self._chunk_launch = config.chunk_launch_us * 1e-6
        self._chunk_whole_waves = config.chunk_waves
        self._chunk_split = config.chunk_split_us * 1e-6
        self._chunk_wave = config.chunk_wave_us * 1e-6
        self._chunk_block_per_key = config.chunk_token_ns * 1e-9
        self._copy_per_token = (
            2 * (heads + kv_heads) * head_dim * dtype_bytes / (config.chunk_copy_gigabytes_per_s * 1e9)
        )
        block_per_token = 2 * (row_bytes or head_dim * dtype_bytes) / (config.decode_gigabytes_per_s * 1e9)
        self._decode_wave_per_token = block_per_token * self._wave_blocks
        self._decode_whole_waves, self._decode_spread = config.decode_waves, config.decode_spread
        self._decode_launch = config.decode_launch_us * 1e-6
        self._decode_wave = config.decode_wave_us * 1e-6
        self._decode_split = config.decode_split_us * 1e-6
        self._block_per_token, self._max_block_tokens = config.decode_token_ns * 1e-9, config.decode_tokens

        # Caches of `_chunk_parts` by the chunk's length, and of `_decode_parts` by the number of decodes.
        self._parts_by_length: dict[int, tuple[float, float, float, float]] = {}
        self._parts_by_number: dict[int, tuple[float, float, float, float, float]] = {}

    def chunk(self, length: int, prefix: int) -> float:
        """Return the seconds for a chunk of `length` tokens over itself and the `prefix` tokens before it."""
        overhead, per_key, split, per_split_key = self._parts_by_length.get(length) or self._chunk_parts(length)
        keys = prefix + self._self_share * length
        whole, parts = per_key * keys, split + per_split_key * keys
        return overhead + (whole if whole < parts else parts)

    def chunks(self, chunks: Sequence[tuple[int, int]]) -> float:
        """Return the seconds of one kernel for several chunks, (length, prefix) each, whose blocks share the waves."""
        blocks = tokens = work = longest = 0.0
        for length, prefix in chunks:
            own, keys = (
                -(-length // _BLOCK_QUERIES) * self._heads / self._wave_blocks,
                prefix + self._self_share * length,
            )
            blocks += own
            tokens += length
            work += own * keys
            longest = max(longest, keys)
        waves = blocks + self._chunk_whole_waves * (-(-blocks // 1) - blocks)
        overhead = self._chunk_launch + waves * self._chunk_wave + tokens * self._copy_per_token
        whole = max(waves / blocks * work * self._chunk_wave_per_key, longest * self._chunk_block_per_key)
        split = self._chunk_split + work * self._chunk_spread * self._chunk_wave_per_key if blocks < 1 else math.inf
        return overhead + min(whole, split)

    def _chunk_parts(self, length: int) -> tuple[float, float, float, float]:
        """Return a chunk's overhead and seconds per key, then the added overhead and seconds per key of split keys."""
        blocks = -(-length // _BLOCK_QUERIES) * self._heads / self._wave_blocks
        waves = blocks + self._chunk_whole_waves * (-(-blocks // 1) - blocks)
        per_key = waves * self._chunk_wave_per_key
        if per_key < self._chunk_block_per_key:
            per_key = self._chunk_block_per_key
        per_split_key = blocks * self._chunk_spread * self._chunk_wave_per_key
        overhead = self._chunk_launch + waves * self._chunk_wave + length * self._copy_per_token
        split = self._chunk_split if blocks < 1 else math.inf
        self._parts_by_length[length] = parts = overhead, per_key, split, per_split_key
        return parts

    def decodes(self, requests: int, context: float) -> float:
        """Return the seconds for `requests` decodes, whose contexts sum to `context` tokens."""
        overhead, per_token, split, per_split_token, max_block_tokens = self._parts_by_number.get(
            requests
        ) or self._decode_parts(requests)
        mean = context / requests
        whole = overhead + per_token * mean
        if split == math.inf:
            return whole
        block = (mean if mean < max_block_tokens else max_block_tokens) * self._block_per_token
        parts = split + _joined(block, per_split_token * mean)
        return whole if whole < parts else parts

    def _decode_parts(self, requests: int) -> tuple[float, float, float, float, float]:
        """Return the terms of the time of `requests` decodes.

        These are the overhead and the seconds per token of mean context, then both with split keys (an infinite
        overhead if keys are never split), and the maximum tokens that one block reads then.
        """
        blocks = requests * self._kv_heads / self._wave_blocks
        partial = self._decode_whole_waves * (-(-blocks // 1) - blocks)  # extra cost of a partial last wave
        waves = blocks + partial if blocks > _MOST_SPLIT_WAVES else _MOST_SPLIT_WAVES
        overhead = self._decode_launch + waves * self._decode_wave
        split, split_waves = math.inf, 0.0
        if blocks < _MOST_SPLIT_WAVES:
            split_waves = min(_MOST_SPLIT_WAVES, blocks * self._decode_spread)
            split = self._decode_launch + self._decode_split + split_waves * self._decode_wave
        per_wave = self._decode_wave_per_token
        self._parts_by_number[requests] = parts = (
            overhead,
            _joined(self._block_per_token, waves * per_wave),
            split,
            split_waves * per_wave,
            self._max_block_tokens * blocks,
        )
        return parts


def _joined(block: float, read: float) -> float:
    """Combine the longest block's time and the memory time of decodes by a p-norm."""
    return math.pow(math.pow(block, _NORM_ORDER) + math.pow(read, _NORM_ORDER), 1 / _NORM_ORDER)
