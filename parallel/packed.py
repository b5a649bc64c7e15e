"""Weights of linear layers that are laid out once for oneDNN's products on a CPU.

torch's own product reads them as they lie, or packs them at every call. With packed weights a product of 256 rows takes
half the time, and one of 8 rows a third (`docs/performance.md`). The weight as it was loaded goes, so that none is held
twice.
"""

from __future__ import annotations

import os

import torch
from torch import nn

# oneDNN makes code for each number of rows and shape of weight that it meets, half a millisecond and about a megabyte.
# By itself it keeps 1,024 of them. It reads this when it first makes one.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")

_TYPICAL_ROWS = 256  # oneDNN chooses the layout for a number of rows; products of others use it too


class PackedWeight:
    """A weight [out, in] in oneDNN's layout."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL_ROWS)
        self._out_size = len(weight)

    def linear(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return x @ weight.T + bias + residual, [T, out]."""
        if not len(x):
            return x.new_zeros(0, self._out_size)
        if residual is None:
            return torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")
        return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._packed, bias, "add")


def take_packed(linear: nn.Module) -> PackedWeight | None:
    """Pack a layer's weight and free it; None, and the layer as it is, where oneDNN does not run or does not gain."""
    weight = linear.weight
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or not torch.backends.mkldnn.is_available():
        return None
    packed = PackedWeight(weight.detach())
    linear.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)
    return packed
