"""The MoE block of a layer: router, routed experts and shared expert."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...conf.architecture import Architecture
from ...kernels.weight_format import WeightFormat
from ...parallel.groups import Groups
from ...parallel.layers import Parts
from .routed import RoutedExperts
from .router import ExpertRouter


class SharedExpert(Protocol):
    """The feed-forward network that every token passes through."""

    def partial(self, x_TH: Tensor) -> Tensor:
        """Return this rank's partial output, before the all-reduce, [T, H]."""
        ...


class Experts(nn.Module):
    """The experts of one layer, plus a residual. Maps [T, H] to [T, H].

    All ranks of a stage have all tokens and route them identically. Each computes its experts, or its tensor-parallel
    shard of every expert, and its shard of the shared expert. One all-reduce sums the partial outputs; there is no
    all-to-all.
    """

    def __init__(
        self,
        arch: Architecture,
        groups: Groups,
        shared: SharedExpert | None,
        *,
        whole: bool,
        dtype: torch.dtype,
        formats: tuple[WeightFormat, WeightFormat] | None = None,
    ) -> None:
        super().__init__()
        assert arch.experts is not None
        H, device = arch.hidden_size, groups.device
        self.router = ExpertRouter(H, arch.experts, dtype=dtype, device=device)
        self.routed = RoutedExperts(
            H,
            arch.expert_size,
            arch.experts,
            mesh=groups.mesh,
            whole=whole,
            dtype=dtype,
            device=device,
            formats=formats,
        )
        self.shared = shared
        has_gate = arch.experts.shared_gate
        self.shared_gate = nn.Parameter(torch.empty(1, H, dtype=dtype, device=device)) if has_gate else None
        self.factor = arch.residual_scale
        self.num_experts = arch.experts.num_experts
        self.picked: Tensor | None = None  # [T, k], the routed experts of the last micro-batch, on a CPU
        self._groups = groups

    def forward(self, x_TH: Tensor, residual: Tensor) -> Parts:
        """Return `residual` + the experts' output, [T, H]."""
        if self._groups.mesh.tp == 1:
            return self._partial(x_TH, residual), None
        return residual, self.product(x_TH)

    def product(self, x_TH: Tensor) -> Tensor:
        """Return the experts' output, [T, H]."""
        part = self._partial(x_TH)
        return self._groups.all_reduce(part) if self._groups.mesh.tp > 1 else part

    def _partial(self, x_TH: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return `residual` (None: zero) + this rank's partial output of the experts, [T, H]."""
        picked, weights = self.router(x_TH)
        self.picked = None if picked.is_cuda else picked
        if self.factor != 1.0:
            weights = weights * self.factor
        out: Tensor = self.routed(x_TH, picked, weights, residual)
        if self.shared is not None:
            own = self.shared.partial(x_TH)
            if self.shared_gate is not None:
                own.mul_(torch.sigmoid(F.linear(x_TH, self.shared_gate)))
            out.add_(own)
        return out
