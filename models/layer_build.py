"""Factory of a stage's layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ..conf.architecture import Architecture
from ..kernels.operators.base import Kernels
from ..parallel.groups import Groups
from ..parallel.layers import ColumnParallelLinear, Format, RowParallelLinear
from .norm import Norm


@dataclass(frozen=True, slots=True)
class LayerBuild:
    """Builds the parts of a rank's layers; weights and activations have the type `dtype`."""

    arch: Architecture
    groups: Groups
    kernels: Kernels
    dtype: torch.dtype

    def column(self, in_size: int, out_size: int, *, bias: bool, format: Format = None) -> ColumnParallelLinear:
        """Make a linear layer with its outputs sharded across tensor-parallel ranks."""
        return ColumnParallelLinear(in_size, out_size, bias=bias, dtype=self.dtype, groups=self.groups, format=format)

    def row(self, in_size: int, out_size: int, *, bias: bool, format: Format = None) -> RowParallelLinear:
        """Make a linear layer with its inputs sharded across tensor-parallel ranks."""
        return RowParallelLinear(in_size, out_size, bias=bias, dtype=self.dtype, groups=self.groups, format=format)

    def norm(self) -> Norm:
        """Make the model's norm over the hidden size."""
        arch, device = self.arch, self.groups.device
        return Norm(arch.hidden_size, arch.norm_eps, self.kernels, kind=arch.norm, dtype=self.dtype, device=device)

    def empty(self, *shape: int) -> nn.Parameter:
        """Make an uninitialized parameter."""
        return nn.Parameter(torch.empty(*shape, dtype=self.dtype, device=self.groups.device))
