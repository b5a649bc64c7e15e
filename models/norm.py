"""Normalization layers: RMSNorm (LLaMA), LayerNorm (GPT-2), and RMSNorm over each head (Qwen3)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from ..conf.schema import Architecture
from .kernels.kernels import Kernels


class RMSNorm(nn.Module):
    """Computes x / rms(x) * weight over the last dimension."""

    def __init__(self, size: int, eps: float, kernels: Kernels, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device))
        self.kernels = kernels
        self.eps = eps

    def forward(self, x_TH: torch.Tensor, added_TH: torch.Tensor | None = None) -> torch.Tensor:
        """Add `added_TH` to x, in place, and return the sum's norm, [T, H]."""
        return self.kernels.norm(x_TH, added_TH, self.weight, None, self.eps)


class LayerNorm(nn.Module):
    """Computes (x - mean(x)) / std(x) * weight + bias over the last dimension."""

    def __init__(self, size: int, eps: float, kernels: Kernels, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(size, dtype=dtype, device=device))
        self.kernels = kernels
        self.eps = eps

    def forward(self, x_TH: torch.Tensor, added_TH: torch.Tensor | None = None) -> torch.Tensor:
        """Add `added_TH` to x, in place, and return the sum's norm, [T, H]."""
        return self.kernels.norm(x_TH, added_TH, self.weight, self.bias, self.eps)


def make_norm(arch: Architecture, kernels: Kernels, *, dtype: torch.dtype, device: torch.device) -> RMSNorm | LayerNorm:
    """Make the norm that `arch` names, over the hidden size."""
    kind = RMSNorm if arch.norm == "rms" else LayerNorm
    return kind(arch.hidden_size, arch.norm_eps, kernels, dtype=dtype, device=device)


class HeadNorm(nn.Module):
    """RMSNorm over each head of [T, K, G + 1, D]. The G query heads share one weight; their key head has another."""

    def __init__(self, head_dim: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.query_weight = nn.Parameter(torch.empty(head_dim, dtype=dtype, device=device))
        self.key_weight = nn.Parameter(torch.empty(head_dim, dtype=dtype, device=device))
        self.shape = (head_dim,)
        self.eps = eps

    def forward(self, qk: torch.Tensor) -> torch.Tensor:
        """Normalize each head of queries and keys, [T, K, G + 1, D]; the last head of each group is the key."""
        normed = F.rms_norm(qk, self.shape, None, self.eps)
        normed[:, :, :-1] *= self.query_weight
        normed[:, :, -1] *= self.key_weight
        return normed
