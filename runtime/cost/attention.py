"""Predicts the time of attention kernels: of a chunk over its prefix and itself, and of decodes over their contexts."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

import math

from ...conf.costs import AttentionConfig

_BLOCK_QUERIES = 64  # rows of queries in a block
_BLOCKS_PER_MULTIPROCESSOR = 2  # that run at once
_MIN_UNSPLIT_WAVES = 0.4  # with fewer waves of blocks, a kernel splits the keys (FlashAttention's rule)
_NORM_ORDER = 4.0  # of the norm that joins the time of a decode's longest block and the time to read all bytes


class AttentionCost:
    """Predicts the time of one layer's attention on one rank.

    A kernel's work is divided into blocks. The multiprocessors run a fixed number of blocks at once: a wave. For
    chunks, a block is 64 queries of one head, which attend to all keys. For decodes, a block is one KV head of a
    request, whose keys and values are read once. Where blocks are few, kernels split the keys, which spreads the work
    of a block over several multiprocessors.

    Args:
        heads, kv_heads, head_dim: the rank's share of the model's heads, and their size.
        multiprocessors: their number on the device.
        dtype_bytes: bytes of an element. The config's rates hold for 2 bytes; time grows in proportion.
    """

    def __init__(
        self,
        config: AttentionConfig,
        heads: int,
        kv_heads: int,
        head_dim: int,
        multiprocessors: int,
        dtype_bytes: int,
    ) -> None:
        self._wave_blocks = _BLOCKS_PER_MULTIPROCESSOR * multiprocessors
        self._heads, self._kv_heads = heads, kv_heads
        flops_per_key = 4 * _BLOCK_QUERIES * head_dim * self._wave_blocks  # of a wave
        self._chunk_wave_per_key = flops_per_key / (config.chunk_tflops * 1e12) * dtype_bytes / 2
        self._self_share, self._chunk_spread = config.chunk_self, config.chunk_spread
        self._chunk_launch = config.chunk_launch_us * 1e-6
        self._chunk_whole_waves = config.chunk_waves
        self._chunk_split = config.chunk_split_us * 1e-6
        self._copy_per_token = 2 * (heads + kv_heads) * head_dim * dtype_bytes / (config.chunk_copy_gbps * 1e9)
        block_per_token = 2 * head_dim * dtype_bytes / (config.decode_gbps * 1e9)
        self._decode_wave_per_token = block_per_token * self._wave_blocks
        self._decode_whole_waves, self._decode_spread = config.decode_waves, config.decode_spread
        self._decode_launch = config.decode_launch_us * 1e-6
        self._decode_wave = config.decode_wave_us * 1e-6
        self._decode_split = config.decode_split_us * 1e-6
        self._block_per_token, self._max_block_tokens = config.decode_token_ns * 1e-9, config.decode_tokens

        # Caches of `_chunk_parts` by the chunk's length, and of `_decode_parts` by the number of decodes.
        self._parts_by_length: dict[int, tuple[float, float, float]] = {}
        self._parts_by_number: dict[int, tuple[float, float, float]] = {}

    def chunk(self, length: int, prefix: int) -> float:
        """Return the seconds for a chunk of `length` tokens over itself and the `prefix` tokens before it."""
        overhead, split, per_key = self._parts_by_length.get(length) or self._chunk_parts(length)
        if prefix + length > 2 * _BLOCK_QUERIES:
            overhead += split
        return overhead + per_key * (prefix + self._self_share * length)

    def _chunk_parts(self, length: int) -> tuple[float, float, float]:
        """Return a chunk's overhead, the overhead of split keys (where there are enough of them), and seconds a key."""
        blocks = -(-length // _BLOCK_QUERIES) * self._heads / self._wave_blocks
        waves = min(blocks + self._chunk_whole_waves * (-(-blocks // 1) - blocks), blocks * self._chunk_spread)
        split = self._chunk_split if blocks < _MIN_UNSPLIT_WAVES else 0.0
        overhead = self._chunk_launch + length * self._copy_per_token
        self._parts_by_length[length] = parts = overhead, split, waves * self._chunk_wave_per_key
        return parts

    def decodes(self, requests: int, context: float) -> float:
        """Return the seconds for `requests` decodes, whose contexts sum to `context` tokens."""
        overhead, max_block_tokens, per_token = self._parts_by_number.get(requests) or self._decode_parts(requests)
        mean = context / requests
        block = (mean if mean < max_block_tokens else max_block_tokens) * self._block_per_token
        order = _NORM_ORDER
        return overhead + math.pow(math.pow(block, order) + math.pow(per_token * mean, order), 1 / order)

    def _decode_parts(self, requests: int) -> tuple[float, float, float]:
        """Return the overhead, the most tokens that one block reads, and seconds a token of the mean context."""
        blocks = requests * self._kv_heads / self._wave_blocks
        overhead, max_block_tokens = self._decode_launch, math.inf
        if blocks < _MIN_UNSPLIT_WAVES:
            overhead += self._decode_split
            max_block_tokens = self._max_block_tokens * blocks
            waves = min(0.5, blocks * self._decode_spread)
        else:
            partial = self._decode_whole_waves * (-(-blocks // 1) - blocks)  # what a last wave costs beyond its blocks
            waves = 0.5 if blocks <= 0.5 else blocks + partial
        overhead += waves * self._decode_wave
        self._parts_by_number[requests] = parts = overhead, max_block_tokens, waves * self._decode_wave_per_token
        return parts
