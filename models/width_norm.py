"""RMSNorm over queries and keys: over each head (Qwen3), or over all heads together (OLMo 2)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..conf.architecture import Architecture
from ..parallel.groups import Groups


class HeadNorm(nn.Module):
    """RMSNorm over each head of [T, K, G + 1, D]. The G query heads share one weight; their key head has another."""

    def __init__(self, head_dim: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.query_weight = nn.Parameter(torch.empty(head_dim, dtype=dtype, device=device))
        self.key_weight = nn.Parameter(torch.empty(head_dim, dtype=dtype, device=device))
        self.shape = (head_dim,)
        self.eps = eps

    def forward(self, qk: Tensor) -> Tensor:
        """Normalize each head of queries and keys, [T, K, G + 1, D]; the last head of each group is the key."""
        normed = F.rms_norm(qk, self.shape, None, self.eps)
        normed[:, :, :-1] *= self.query_weight
        normed[:, :, -1] *= self.key_weight
        return normed


class WidthNorm(nn.Module):
    """RMSNorm over all query heads of a token together, and over all its key heads, also those of other ranks."""

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
