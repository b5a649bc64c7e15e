"""Chooses the operators that `model.kernels` names, or the best that run here."""

from __future__ import annotations

import torch

from ...conf.errors import ConfigError
from .. import processor
from ..cpp_library import ELEMENTS, NoLibraryError
from .base import Kernels, TorchKernels
from .cpp import CppKernels

_HELP = "install a wheel that has kernels for this processor, or GCC"
_FOR = {"cpp": "float32 and bfloat16 on a CPU", "triton": "CUDA"}


def make_kernels(name: str, *, dtype: torch.dtype, device: torch.device) -> Kernels:
    """Make the operators `cpp`, `triton` or `torch`. `auto` is cpp or triton if one runs here, else torch.

    Raises:
        ConfigError: cpp or triton was requested and does not run here.
    """
    reason = ""
    if name in ("auto", "cpp") and device.type == "cpu" and dtype in ELEMENTS:
        try:
            return CppKernels(dtype)
        except NoLibraryError as error:
            reason = processor.lacking() or f"{error}; {_HELP}"
    elif name in ("auto", "triton") and device.type == "cuda":
        try:
            from .triton import TritonKernels

            return TritonKernels(device)
        except Exception as error:  # raised by Triton, its import, a compiler or the driver
            reason = f"Triton does not run here ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
    if name in _FOR:
        raise ConfigError(f"model.kernels={name}: {reason or f'they are for {_FOR[name]}'}; torch runs anywhere")
    return TorchKernels(reason)
