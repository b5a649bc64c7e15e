"""Chooses the attention backend of a run: the one that `model.attention` names, or the best that runs here."""

from __future__ import annotations

import torch

from ...conf.errors import ConfigError
from ..kernels.cpp import CppKernels
from ..kernels.kernels import Kernels
from .backend import AttentionBackend
from .cpp import CppBackend
from .sdpa import SdpaBackend
from .xformers import XformersBackend, why_not, why_not_paged


def make_backend(
    name: str,
    kernels: Kernels,
    *,
    block_size: int,
    num_blocks: int,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
    head_dim: int,
) -> AttentionBackend:
    """Make the backend `sdpa` or `xformers`. `auto` is xformers or the C++ one where it runs, else sdpa.

    Raises:
        ConfigError: xformers was asked for and does not run here.
    """
    if name != "sdpa":
        reason = why_not(dtype, device, head_dim)
        if reason is None:
            return XformersBackend(
                block_size=block_size,
                num_blocks=num_blocks,
                window=window,
                dtype=dtype,
                device=device,
                paged=why_not_paged(dtype, device, head_dim, block_size) is None,
            )
        if name == "xformers":
            raise ConfigError(f"model.attention=xformers: {reason}; sdpa runs anywhere")
        if isinstance(kernels, CppKernels):
            return CppBackend(kernels, block_size=block_size, window=window)
    return SdpaBackend(block_size=block_size, window=window, dtype=dtype, device=device)
