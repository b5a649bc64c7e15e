"""RMSNorm over all query heads of a token together, and over all its key heads (OLMo 2)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..conf.architecture import Architecture
from ..parallel.groups import Groups


class WidthNorm(nn.Module):
    """RMSNorm over all query heads of a token together, and over all its key heads, across tensor-parallel ranks."""

    def __init__(self, arch: Architecture, groups: Groups, *, dtype: torch.dtype) -> None:
        super().__init__()
        D, tp, device = arch.head_dim, groups.mesh.tp, groups.device
        self.query_weight = nn.Parameter(torch.empty(arch.num_heads // tp * D, dtype=dtype, device=device))
        self.key_weight = nn.Parameter(torch.empty(arch.num_kv_heads // tp * D, dtype=dtype, device=device))
        self.sizes = (arch.num_heads * D, arch.num_kv_heads * D)
        self.eps = arch.norm_eps
        self._groups = groups

    def forward(self, qkv_TKED: Tensor) -> None:
        """Normalize the queries and the keys among [T, K, G + 2, D], in place."""
        parts = qkv_TKED[:, :, :-2], qkv_TKED[:, :, -2:-1]
        squares = torch.stack([part.float().square().sum((1, 2, 3)) for part in parts])
        self._groups.all_reduce(squares)
        for part, weight, square, size in zip(
            parts, (self.query_weight, self.key_weight), squares, self.sizes, strict=True
        ):
            scale = torch.rsqrt(square / size + self.eps)[:, None, None, None]
            part.copy_(part * scale * weight.view(part.shape[1:]))
