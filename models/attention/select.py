"""Chooses the attention backend: the one that `model.attention` names, or the best that runs here."""

from __future__ import annotations

import torch

from ...conf.errors import ConfigError
from ...conf.latent import LatentConfig
from ...kernels.operators.base import Kernels
from ...kernels.operators.cpp import CppKernels
from . import flash, tiled, xformers
from .backend import AttentionBackend, AttentionSizes
from .cpp import CppBackend
from .latent import LatentBackend
from .scores import ScoresBackend
from .sdpa import SdpaBackend


def why_not(name: str, sizes: AttentionSizes) -> str | None:
    """Return in one line why the backend `flash`, `xformers` or `sdpa` does not run here. None: it runs."""
    if name == "sdpa":
        return None
    return flash.why_not(sizes) if name == "flash" else xformers.why_not(sizes)


def make_backend(
    name: str,
    kernels: Kernels,
    sizes: AttentionSizes,
    *,
    softcap: float | None = None,
    has_sinks: bool = False,
    latent: LatentConfig | None = None,
) -> AttentionBackend:
    """Make the backend `flash`, `xformers` or `sdpa`. `auto` is flash or a C++ backend if one runs here, else sdpa.

    MLA (`latent`) wraps the backend. Logit soft-capping and sinks need the AMX backend (`tiled`), else `ScoresBackend`.
    Only sdpa and `CppBackend` read an 8-bit KV cache.

    Raises:
        ConfigError: the requested backend does not run here.
    """
    if latent is not None:
        return LatentBackend(make_backend(name, kernels, sizes), latent, SdpaBackend(sizes))
    if name == sizes.cache_dtype == "auto" and isinstance(kernels, CppKernels) and tiled.runs(sizes):
        return tiled.TiledBackend(sizes, softcap)
    if softcap is not None or has_sinks:
        if name not in ("auto", "sdpa"):
            raise ConfigError(
                f"model.attention={name}: supports no soft caps and no sinks, and this model has one of them; use auto"
            )
        return ScoresBackend(sizes, softcap)
    wanted = "flash" if name == "auto" else name
    reason = why_not(wanted, sizes)
    if wanted != "sdpa" and reason is None and sizes.cache_dtype != "auto":
        reason = f"reads keys in the model's dtype, not cache.dtype={sizes.cache_dtype}"
    if reason is not None and name != "auto":
        raise ConfigError(f"model.attention={name}: {reason}; sdpa runs anywhere")
    backend: AttentionBackend = SdpaBackend(sizes)
    if reason is not None and isinstance(kernels, CppKernels):
        has_faster = sizes.dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported()
        return CppBackend(kernels.attention, sizes, SdpaBackend(sizes) if has_faster else None)
    if reason is not None or wanted == "sdpa":
        about = "sdpa" if reason is None else f"sdpa, since flash does not run here: {reason}"
    elif wanted == "xformers":
        backend, about = xformers.XformersBackend(sizes), "xformers"
    else:
        unpaged = flash.why_not_paged(sizes)
        backend = flash.FlashBackend(sizes, paged=unpaged is None)
        about = f"flash, of torch {torch.__version__}, which " + (
            f"reads keys by pages of {sizes.block_size} tokens"
            if unpaged is None
            else f"copies keys of requests whose blocks do not follow each other, since {unpaged}"
        )
    if sizes.device.type == "cuda":
        backend.about = about + ("" if name == "auto" else f" (model.attention={name})")
    return backend
