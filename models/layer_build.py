"""What the layers of a stage are built with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ..conf.architecture import Architecture
from ..parallel.groups import Groups
from ..parallel.layers import ColumnParallelLinear, Format, RowParallelLinear
from .kernels.kernels import Kernels
from .norm import Norm


@dataclass(frozen=True, slots=True)
class LayerBuild:
    """What all layers of a rank are built with, of a model whose weights and activations are of `dtype`."""

    arch: Architecture
    groups: Groups
    kernels: Kernels
    dtype: torch.dtype

    def column(self, in_size: int, out_size: int, *, bias: bool, format: Format = None) -> ColumnParallelLinear:
        """Make a linear layer whose outputs the ranks share."""
        return ColumnParallelLinear(in_size, out_size, bias=bias, dtype=self.dtype, groups=self.groups, format=format)

    def row(self, in_size: int, out_size: int, *, bias: bool, format: Format = None) -> RowParallelLinear:
        """Make a linear layer whose inputs the ranks share."""
        return RowParallelLinear(in_size, out_size, bias=bias, dtype=self.dtype, groups=self.groups, format=format)

    def norm(self) -> Norm:
        """Make the norm that the model has over its hidden size."""
        arch, device = self.arch, self.groups.device
        return Norm(arch.hidden_size, arch.norm_eps, self.kernels, kind=arch.norm, dtype=self.dtype, device=device)

    def empty(self, *shape: int) -> nn.Parameter:
        """Make a parameter that is to be loaded."""
        return nn.Parameter(torch.empty(*shape, dtype=self.dtype, device=self.groups.device))
