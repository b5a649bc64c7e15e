"""Tries an attention backend on a small case, before a run relies on it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..batch import RaggedBatch, Segment
from .backend import AttentionBackend
from .sdpa import SdpaBackend


def lacks_half(dtype: torch.dtype, device: torch.device, head_dim: int) -> str | None:
    """Return what operators of half precision on CUDA lack, whose heads have at most 256 elements; None: nothing."""
    if device.type != "cuda":
        return "needs CUDA"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"needs model.dtype=bfloat16 or float16, not {str(dtype).removeprefix('torch.')}"
    if head_dim > 256 or head_dim % 8:
        return f"needs heads of at most 256 in steps of 8, not {head_dim}"
    return None


def probe(
    backend: AttentionBackend, dtype: torch.dtype, device: torch.device, head_dim: int, *, block_size: int
) -> str | None:
    """Compare a backend without a window with SDPA in float32. Returns what is wrong, in one line, or None.

    The batches have a chunk behind a prefix and two decodes, whose blocks lie in the cache out of order: those of each
    request follow each other in the first batch, and are scattered in the second.
    """
    try:
        generator = torch.Generator(device).manual_seed(0)
        q = torch.randn(7, 2, 2, head_dim, device=device, dtype=dtype, generator=generator)
        keys, values = (
            torch.randn(8 * block_size, 2, head_dim, device=device, dtype=dtype, generator=generator) for _ in range(2)
        )
        exact = SdpaBackend(block_size=block_size, window=None, dtype=torch.float32, device=device)
        error = 0.0
        for chunk, decode in (([6, 7], [3, 4]), ([7, 2], [5, 1])):
            chunks = [Segment(start=block_size - 2, length=5, blocks=chunk)]
            decodes = [Segment(8, 1, [0]), Segment(block_size + 8, 1, decode)]
            batch = RaggedBatch.of([0] * 7, chunks, decodes, sample_rows=[])
            found = backend.attend(q, keys, values, backend.plan(batch)).float()
            expected = exact.attend(q.float(), keys.float(), values.float(), exact.plan(batch))
            error += F.l1_loss(found, expected).item()  # NaN stays one
    except Exception as problem:  # imports and operators may fail in any way; whichever it is, the backend does not run
        return f"{type(problem).__name__}: {' '.join(str(problem).split()) or 'no reason'}"
    return None if error < 0.01 else f"its result is wrong here (mean error {error:.2g})"
