"""Time of attention kernels: over a chunk's prefix and itself, and of decodes over their contexts."""

from __future__ import annotations

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
        self, config: AttentionConfig, heads: int, kv_heads: int, head_dim: int, multiprocessors: int,
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

    def chunk(self, length: int, prefix: int) -> float:
        """Seconds for a chunk of `length` tokens over itself and the `prefix` tokens before it."""
        blocks = -(-length // _QUERIES) * self._heads / self._slots
        waves = min(blocks + self._chunk_whole * (-(-blocks // 1) - blocks), blocks * self._chunk_spread)
        overhead = self._chunk_launch + length * self._copy
        if blocks < _SPLIT and prefix + length > 2 * _QUERIES:
            overhead += self._chunk_split
        return overhead + waves * self._wave * (prefix + self._self * length)

    def decodes(self, requests: int, context: float) -> float:
        """Seconds for `requests` decodes over `context` tokens in sum."""
        mean = context / requests
        blocks = requests * self._kv_heads / self._slots
        overhead, way = self._decode_launch, mean
        if blocks < _SPLIT:
            overhead += self._split
            way = min(mean, self._way_tokens * blocks)
            waves = min(0.5, blocks * self._decode_spread)
        else:
            waves = max(0.5, blocks if blocks <= 0.5 else blocks + self._whole * (-(-blocks // 1) - blocks))
        busy = waves * self._decode_wave * mean
        overhead += waves * self._fixed
        return overhead + ((way * self._way) ** _KNEE + busy**_KNEE) ** (1 / _KNEE)
