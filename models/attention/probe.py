"""Checks an attention backend on a small case before a run relies on it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F

from ..batch import RaggedBatch, Segment
from .backend import AttentionBackend, AttentionSizes
from .sdpa import SdpaBackend

_BLOCKS = 8  # of the cache


def lacks_half(sizes: AttentionSizes) -> str | None:
    """Return the unmet requirement of half-precision CUDA operators (head dimension up to 256); None: all are met."""
    dtype, head_dim = sizes.dtype, sizes.head_dim
    if sizes.device.type != "cuda":
        return "needs CUDA"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"needs model.dtype=bfloat16 or float16, not {str(dtype).removeprefix('torch.')}"
    if head_dim > 256 or head_dim % 8:
        return f"needs heads of at most 256 in steps of 8, not {head_dim}"
    return None


def probed_sizes(sizes: AttentionSizes, block_size: int) -> AttentionSizes:
    """Return the sizes for a backend to pass to `probe`."""
    return replace(sizes, block_size=block_size, num_blocks=_BLOCKS, window=None)


def probe(backend: AttentionBackend) -> str | None:
    """Compare a backend of `probed_sizes` with SDPA in float32. Returns what is wrong, in one line, or None.

    Each of two batches has a chunk after a prefix and two decodes. In the first batch each request's blocks are
    contiguous, in the second they are scattered.
    """
    sizes = backend.sizes
    block_size, shape = sizes.block_size, (2, sizes.head_dim)
    try:
        generator = torch.Generator(sizes.device).manual_seed(0)
        draw = partial(torch.randn, dtype=sizes.dtype, device=sizes.device, generator=generator)
        q = draw(7, 2, *shape)
        keys, values = (draw(_BLOCKS * block_size, *shape) for _ in range(2))
        exact = SdpaBackend(replace(sizes, dtype=torch.float32))
        error = 0.0
        for chunk, decode in (([6, 7], [3, 4]), ([7, 2], [5, 1])):
            chunks = [Segment(start=block_size - 2, length=5, blocks=chunk)]
            decodes = [Segment(8, 1, [0]), Segment(block_size + 8, 1, decode)]
            batch = RaggedBatch.of([0] * 7, chunks, decodes, sample_rows=[])
            found = backend.attend(q, keys, values, backend.plan(batch)).float()
            expected = exact.attend(q.float(), keys.float(), values.float(), exact.plan(batch))
            error += F.l1_loss(found, expected).item()  # NaN propagates
    except Exception as problem:  # imports and operators may fail in any way
        return f"{type(problem).__name__}: {' '.join(str(problem).split()) or 'no reason'}"
    return None if error < 0.01 else f"its result is wrong here (mean error {error:.2g})"
