"""Time of attention kernels: over a chunk's prefix and itself, and of decodes over their contexts."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

import math

from ...conf.costs import AttentionConfig

_QUERIES = 64  # rows of queries in a block
_BLOCKS = 2  # blocks that a multiprocessor has at once
_SPLIT = 0.4  # a decode's keys are split where there are fewer waves of blocks (FlashAttention's rule)
_KNEE = 4.0  # order of the norm that joins a decode's own way and the bytes of all


class Attention:
    """Time of one layer's attention on one rank.

    Work comes in blocks, and blocks in waves of as many as the multiprocessors hold. Of chunks a block is 64 queries
    of a head, which go over all keys; of decodes one KV head of a request, whose keys and values are read once.
    Where blocks are few, kernels split the keys, so that a block's work is spread over several multiprocessors.

    Args:
        heads, kv_heads, head_dim: of the rank.
        multiprocessors: of the device.
        dtype_bytes: of an element; the rate is that of 2, and falls with its size.
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
        self._slots = _BLOCKS * multiprocessors
        self._heads, self._kv_heads = heads, kv_heads
        flops = 4 * _QUERIES * head_dim * self._slots  # of a wave, by token attended to
        self._wave = flops / (config.chunk_tflops * 1e12) * dtype_bytes / 2
        self._self, self._chunk_spread = config.chunk_self, config.chunk_spread
        self._chunk_launch = config.chunk_launch_us * 1e-6
        self._chunk_whole = config.chunk_waves
        self._chunk_split = config.chunk_split_us * 1e-6
        self._copy = 2 * (heads + kv_heads) * head_dim * dtype_bytes / (config.chunk_copy_gbps * 1e9)
        token = 2 * head_dim * dtype_bytes / (config.decode_gbps * 1e9)
        self._decode_wave = token * self._slots
        self._whole, self._decode_spread = config.decode_waves, config.decode_spread
        self._decode_launch = config.decode_launch_us * 1e-6
        self._fixed = config.decode_wave_us * 1e-6
        self._split = config.decode_split_us * 1e-6
        self._way, self._way_tokens = config.decode_token_ns * 1e-9, config.decode_tokens

        # What depends on a chunk's length alone, and on the number of decodes: that is asked for again and again.
        self._of_length: dict[int, tuple[float, float, float]] = {}
        self._of_number: dict[int, tuple[float, float, float]] = {}

    def chunk(self, length: int, prefix: int) -> float:
        """Seconds for a chunk of `length` tokens over itself and the `prefix` tokens before it."""
        overhead, split, key = self._of_length.get(length) or self._chunk(length)
        if prefix + length > 2 * _QUERIES:
            overhead += split
        return overhead + key * (prefix + self._self * length)

    def _chunk(self, length: int) -> tuple[float, float, float]:
        """Seconds that it takes anyway, more where keys are many enough to be split, and by key."""
        blocks = -(-length // _QUERIES) * self._heads / self._slots
        waves = min(blocks + self._chunk_whole * (-(-blocks // 1) - blocks), blocks * self._chunk_spread)
        split = self._chunk_split if blocks < _SPLIT else 0.0
        self._of_length[length] = parts = self._chunk_launch + length * self._copy, split, waves * self._wave
        return parts

    def decodes(self, requests: int, context: float) -> float:
        """Seconds for `requests` decodes over `context` tokens in sum."""
        overhead, longest, busy = self._of_number.get(requests) or self._decodes(requests)
        mean = context / requests
        way = (mean if mean < longest else longest) * self._way
        return overhead + math.pow(math.pow(way, _KNEE) + math.pow(busy * mean, _KNEE), 1 / _KNEE)

    def _decodes(self, requests: int) -> tuple[float, float, float]:
        """Seconds that they take anyway, the most tokens of a block's own way, and seconds by token of the mean
        context."""
        blocks = requests * self._kv_heads / self._slots
        overhead, longest = self._decode_launch, math.inf
        if blocks < _SPLIT:
            overhead += self._split
            longest = self._way_tokens * blocks
            waves = min(0.5, blocks * self._decode_spread)
        else:
            waves = max(0.5, blocks if blocks <= 0.5 else blocks + self._whole * (-(-blocks // 1) - blocks))
        self._of_number[requests] = parts = overhead + waves * self._fixed, longest, waves * self._decode_wave
        return parts
