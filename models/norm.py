"""Normalization layers over the hidden size: RMSNorm (LLaMA) and LayerNorm (GPT-2)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..kernels.operators.base import Kernels


class Norm(nn.Module):
    """The norm of `Architecture.norm` over the last dimension, computed by `Kernels.norm`."""

    def __init__(
        self, size: int, eps: float, kernels: Kernels, *, kind: str = "rms", dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        weight, bias = (make(size, dtype=dtype, device=device) for make in (torch.ones, torch.zeros))
        self.weight: Tensor = weight if kind == "layer_plain" else nn.Parameter(weight)
        self.bias: Tensor | None = None if kind == "rms" else nn.Parameter(bias) if kind == "layer" else bias
        self.kernels = kernels
        self.eps = eps

    def forward(self, x_TH: Tensor, added_TH: Tensor | None = None) -> Tensor:
        """Add `added_TH` to x in place, and return the normalized sum, [T, H]."""
        return self.kernels.norm(x_TH, added_TH, self.weight, self.bias, self.eps)
