"""Normalization layers over the hidden size: RMSNorm (LLaMA) and LayerNorm (GPT-2)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..conf.architecture import Architecture
from .kernels.kernels import Kernels


class RMSNorm(nn.Module):
    """Computes x / rms(x) * weight over the last dimension."""

    def __init__(self, size: int, eps: float, kernels: Kernels, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device))
        self.kernels = kernels
        self.eps = eps

    def forward(self, x_TH: Tensor, added_TH: Tensor | None = None) -> Tensor:
        """Add `added_TH` to x, in place, and return the sum's norm, [T, H]."""
        return self.kernels.norm(x_TH, added_TH, self.weight, None, self.eps)


class LayerNorm(nn.Module):
    """Computes (x - mean(x)) / std(x) * weight + bias over the last dimension, where the model has the two."""

    def __init__(
        self,
        size: int,
        eps: float,
        kernels: Kernels,
        *,
        has_weight: bool,
        has_bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        weight, bias = (make(size, dtype=dtype, device=device) for make in (torch.ones, torch.zeros))
        self.weight = nn.Parameter(weight) if has_weight else weight
        self.bias = nn.Parameter(bias) if has_bias else bias
        self.kernels = kernels
        self.eps = eps

    def forward(self, x_TH: Tensor, added_TH: Tensor | None = None) -> Tensor:
        """Add `added_TH` to x, in place, and return the sum's norm, [T, H]."""
        return self.kernels.norm(x_TH, added_TH, self.weight, self.bias, self.eps)


def make_norm(arch: Architecture, kernels: Kernels, *, dtype: torch.dtype, device: torch.device) -> RMSNorm | LayerNorm:
    """Make the norm that `arch` names, over the hidden size."""
    if arch.norm == "rms":
        return RMSNorm(arch.hidden_size, arch.norm_eps, kernels, dtype=dtype, device=device)
    has_weight, has_bias = arch.norm != "layer_plain", arch.norm == "layer"
    return LayerNorm(
        arch.hidden_size, arch.norm_eps, kernels, has_weight=has_weight, has_bias=has_bias, dtype=dtype, device=device
    )
