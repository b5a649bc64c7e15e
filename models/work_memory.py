"""What a rank on CUDA allocates beside weights and KV cache: the buffers of its CUDA graphs, and the sampler's memory.

Not counted are activations of more rows than graphs have, logits of prompts whose log-probabilities are wanted, and
what CUDA and NCCL keep for themselves, of graphs too. This file imports no torch.
"""

from __future__ import annotations

from ..conf.architecture import Architecture

MAX_GRAPH_ROWS = 512
SLICE_ELEMENTS = 1 << 25  # of a work tensor of the sampler; more rows are computed in slices
DIGITS = 1 << 16  # values of half a logit, by which top-p adds up weights where the vocabulary is large
FEW_TOKENS = 1 << 13  # a vocabulary of so many is sorted instead
PAGE_STEP = 256  # torch's flash_api.cpp: "Paged KV cache block size must be divisible by 256"


def graph_bytes(arch: Architecture, tp: int, dtype_bytes: int) -> int:
    """Return the bytes of the buffers of all graphs, and of the pool in which they compute a layer."""
    queries, keys = arch.num_heads * arch.head_dim // tp, max(1, arch.num_kv_heads // tp) * arch.head_dim
    buffers = arch.hidden_size + 2 * queries + arch.head_dim
    wide = (3 if arch.gated_ffn else 2) * arch.ffn_size // tp
    pool = 5 * arch.hidden_size + max(wide, 3 * (queries + 2 * keys))
    numbers = 3 * 8 + 4 * (2 + -(-arch.max_position // PAGE_STEP))
    return MAX_GRAPH_ROWS * ((buffers + pool) * dtype_bytes + numbers)


def sampler_bytes(vocab_size: int, num_rows: int) -> int:
    """Return the most bytes of the float32 logits of `num_rows` rows, of their edited copy, and of drawing by top-p."""
    digits = DIGITS if vocab_size > FEW_TOKENS else 0
    at_once = min(num_rows, max(1, SLICE_ELEMENTS // max(vocab_size, digits)))
    return 2 * 4 * num_rows * vocab_size + at_once * (56 * vocab_size + 24 * digits)
