"""Weights that C++ multiplies with: each of their functions takes what `Multiply` of `rows.h` does."""

from __future__ import annotations

from collections.abc import Iterable
from ctypes import Structure, addressof, c_int64, c_void_p, cast
from typing import Any

import torch
from torch import Tensor

from .cpp_library import addresses

ARGUMENTS = 5 * "p" + 2 * "i"  # of a function, for `cpp_library.load`
ANY_ROWS = 1 << 62


class CppProduct:
    """A weight [out, in] on a CPU.

    Attributes:
        in_size, out_size: inputs and outputs.
        function: the address of the C++ function.
        weight: that of what it is given as the weight, which lives as long as this object.
    """

    def __init__(self, function: Any, shape: Iterable[int], held: Structure) -> None:
        self._multiply, self._held = function, held
        self.out_size, self.in_size = shape
        self.function, self.weight = cast(function, c_void_p).value, addressof(held)

    @property
    def most_rows(self) -> int:
        """The rows that the function may be given."""
        return ANY_ROWS

    def linear(self, x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        """Return x @ weight.T + bias + residual, [T, out]."""
        x, out = self.inputs(x), x.new_empty(len(x), self.out_size)
        residual = None if residual is None else residual.contiguous()
        self._multiply(self.weight, *addresses(x, bias, residual, out), len(x), 0)
        return out

    def logits(self, x: Tensor) -> Tensor:
        """Return x @ weight.T as it was summed, float32, [T, out]."""
        x, out = self.inputs(x), x.new_empty(len(x), self.out_size, dtype=torch.float32)
        self._multiply(self.weight, *addresses(x, None, None, out), len(x), 1)
        return out

    def inputs(self, x: Tensor) -> Tensor:
        """Return rows as the weight is laid out."""
        return x.contiguous()


class PackedMatrix(Structure):
    """`PackedMatrix` of `packed.cpp`."""

    _fields_ = (("weight", c_void_p), *((name, c_int64) for name in ("inputs", "outputs", "form")))
