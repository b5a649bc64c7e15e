"""RMSNorm over each head of queries and keys (Qwen3)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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
