"""Chooses the operators that `model.kernels` names, or the best that run here."""

from __future__ import annotations

import torch

from ...conf.errors import ConfigError
from ...parallel.cpp_library import NoLibraryError
from .cpp import CppKernels
from .kernels import Kernels, TorchKernels


def make_kernels(name: str, *, dtype: torch.dtype, device: torch.device) -> Kernels:
    """Make the operators `cpp` or `torch`. `auto` is cpp where it runs, else torch.

    Raises:
        ConfigError: cpp was asked for and does not run here.
    """
    if name == "torch":
        return TorchKernels()
    reason = None
    if device.type != "cpu" or dtype != torch.float32:
        reason = "they are for float32 on a CPU"
    else:
        try:
            return CppKernels()
        except NoLibraryError as error:
            reason = str(error)
    if name == "cpp":
        raise ConfigError(f"model.kernels=cpp: {reason}; torch runs anywhere")
    return TorchKernels()
