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
    no_library = ""
    if device.type == "cpu" and dtype == torch.float32:
        try:
            return CppKernels()
        except NoLibraryError as error:
            no_library = str(error)
    if name == "cpp":
        reason = no_library or "they are for float32 on a CPU"
        raise ConfigError(f"model.kernels=cpp: {reason}; torch runs anywhere")
    return TorchKernels(no_library)
