"""Products with quantized weights."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from .packed import PackedWeight, can_pack
from .quantized_matrix import QuantizedMatrix


class Product(Protocol):
    """A weight [out, in], laid out for the products of a device."""

    def linear(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return x @ weight.T + bias + residual, [T, out]."""
        ...


class TableProduct(Product, Protocol):
    """One whose rows can be read too: an embedding's."""

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the weight's rows, [T, in]."""
        ...


class DequantizedWeight:
    """A weight that is quantized in its file only."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight

    def linear(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return x @ weight.T + bias + residual, [T, out]."""
        out = F.linear(x, self._weight, bias)
        return out if residual is None else out.add_(residual)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the weight's rows, [T, in]."""
        return F.embedding(ids, self._weight)


def make_product(matrix: QuantizedMatrix, dtype: torch.dtype) -> Product:
    """Lay a linear layer's matrix out for activations of a type."""
    weight = matrix.dequantized().to(dtype)
    return PackedWeight(weight) if can_pack(weight) else DequantizedWeight(weight)


def make_table(matrix: QuantizedMatrix, dtype: torch.dtype) -> TableProduct:
    """Lay an embedding's matrix out, which may be an LM head's too."""
    return DequantizedWeight(matrix.dequantized().to(dtype))
