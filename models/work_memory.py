"""A CUDA rank's work memory besides weights and KV cache: CUDA graph buffers, and the sampler's memory.

Not included: activations of more rows than graphs have, logits for prompt log-probabilities, and internal memory of
CUDA and NCCL, including for graphs. This file imports no torch.
"""

from __future__ import annotations

from ..conf.architecture import Architecture

MAX_GRAPH_ROWS = 512
SLICE_ELEMENTS = 1 << 25  # of a sampler work tensor; more rows are processed in several parts
DIGITS = 1 << 16  # values of 16 bits of a logit: bins of top-p's radix search for large vocabularies
FEW_TOKENS = 1 << 13  # up to this vocabulary size, tokens are sorted instead
PAGE_STEP = 256  # torch's flash_api.cpp: "Paged KV cache block size must be divisible by 256"


def graph_bytes(arch: Architecture, tp: int, dtype_bytes: int) -> int:
    """Return the bytes of all graphs' static buffers and of their shared memory pool."""
    queries, keys = arch.num_heads * arch.head_dim // tp, max(1, arch.num_kv_heads // tp) * arch.head_dim
    buffers = arch.hidden_size + 2 * queries + arch.head_dim
    wide = (3 if arch.gated_ffn else 2) * arch.ffn_size // tp
    pool = 5 * arch.hidden_size + max(wide, 3 * (queries + 2 * keys))
    numbers = 3 * 8 + 4 * (2 + -(-arch.max_position // PAGE_STEP))
    return MAX_GRAPH_ROWS * ((buffers + pool) * dtype_bytes + numbers)


def sampler_bytes(vocab_size: int, num_rows: int) -> int:
    """Return the peak bytes of `num_rows` rows of float32 logits, their edited copy, and top-p sampling."""
    digits = DIGITS if vocab_size > FEW_TOKENS else 0
    at_once = min(num_rows, max(1, SLICE_ELEMENTS // max(vocab_size, digits)))
    return 2 * 4 * num_rows * vocab_size + at_once * (56 * vocab_size + 24 * digits)
