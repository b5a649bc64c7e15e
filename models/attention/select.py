"""Chooses the attention backend of a run: the one that `model.attention` names, or the best that runs here."""

from __future__ import annotations

import torch

from ...conf.errors import ConfigError
from ...conf.latent import LatentConfig
from ..kernels.cpp import CppKernels
from ..kernels.kernels import Kernels
from . import flash, tiled, xformers
from .backend import AttentionBackend
from .cpp import CppBackend
from .latent import LatentBackend
from .scores import ScoresBackend
from .sdpa import SdpaBackend


def why_not(name: str, dtype: torch.dtype, device: torch.device, head_dim: int) -> str | None:
    """Return in one line why the backend `flash`, `xformers` or `sdpa` does not run here. None: it does."""
    if name == "sdpa":
        return None
    own = flash.why_not if name == "flash" else xformers.why_not
    return own(dtype, device, head_dim)


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
    softcap: float | None = None,
    has_sinks: bool = False,
    cache_dtype: str = "auto",
    latent: LatentConfig | None = None,
) -> AttentionBackend:
    """Make the backend `flash`, `xformers` or `sdpa`. `auto` is flash or a C++ one where it runs, else sdpa.

    `latent` attention attends to latents through it. Of these only the one by AMX tiles caps scores and has sinks, else
    torch's products do. Rows of 8 bits are read by sdpa and the other C++ one.

    Raises:
        ConfigError: the one that was asked for does not run here.
    """
    if latent is not None:
        inner = make_backend(
            name,
            kernels,
            block_size=block_size,
            num_blocks=num_blocks,
            window=window,
            dtype=dtype,
            device=device,
            head_dim=head_dim,
        )
        sdpa = SdpaBackend(block_size=block_size, window=window, dtype=dtype, device=device)
        return LatentBackend(inner, latent, sdpa)
    may_tile = name == cache_dtype == "auto" and isinstance(kernels, CppKernels)
    if may_tile and tiled.runs(dtype, device, head_dim, block_size):
        return tiled.TiledBackend(block_size=block_size, window=window, softcap=softcap)
    if softcap is not None or has_sinks:
        if name not in ("auto", "sdpa"):
            raise ConfigError(f"model.attention={name}: caps no scores and has no sinks, as this model needs; use auto")
        return ScoresBackend(block_size=block_size, window=window, dtype=dtype, device=device, softcap=softcap)
    wanted = "flash" if name == "auto" else name
    reason = why_not(wanted, dtype, device, head_dim)
    if wanted != "sdpa" and reason is None and cache_dtype != "auto":
        reason = f"reads keys in the model's dtype, not cache.dtype={cache_dtype}"
    if reason is not None and name != "auto":
        raise ConfigError(f"model.attention={name}: {reason}; sdpa runs anywhere")
    backend: AttentionBackend
    sdpa = SdpaBackend(block_size=block_size, window=window, dtype=dtype, device=device)
    if reason is not None and isinstance(kernels, CppKernels):
        has_faster = dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported()
        return CppBackend(kernels, block_size=block_size, window=window, sdpa=sdpa if has_faster else None)
    if reason is not None or wanted == "sdpa":
        backend = sdpa
        about = "sdpa" if reason is None else f"sdpa, since flash does not run here: {reason}"
    elif wanted == "xformers":
        backend = xformers.XformersBackend(
            block_size=block_size, num_blocks=num_blocks, window=window, dtype=dtype, device=device
        )
        about = "xformers"
    else:
        unpaged = flash.why_not_paged(dtype, device, head_dim, block_size)
        backend = flash.FlashBackend(block_size=block_size, window=window, device=device, paged=unpaged is None)
        about = f"flash, of torch {torch.__version__}, which " + (
            f"reads keys by pages of {block_size} tokens"
            if unpaged is None
            else f"copies keys of requests whose blocks do not follow each other, since {unpaged}"
        )
    if device.type == "cuda":
        backend.about = about + ("" if name == "auto" else f" (model.attention={name})")
    return backend
