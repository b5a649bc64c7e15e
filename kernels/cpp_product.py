"""Base class of CPU weights with a C++ GEMM. All their C++ functions share one signature, `Multiply` in `rows.h`."""

from __future__ import annotations

from collections.abc import Iterable
from ctypes import Structure, addressof, c_int64, c_void_p, cast
from typing import Any

import torch
from torch import Tensor

from .cpp_library import CppFile, addresses

ARGUMENTS = 5 * "p" + 2 * "i"  # of `Multiply`, for a `CppFile`
PACKED = CppFile(
    "packed",
    linear=ARGUMENTS,
    linear_short=ARGUMENTS,
    linear_tiled=ARGUMENTS,
    gated_silu_tiled="pppiii",
    multiplies_tiles=":i",
)
_ANY_ROWS = 1 << 62


class CppProduct:
    """A weight [out, in] on a CPU.

    Attributes:
        in_size, out_size: input and output features.
        function: address of the C++ GEMM.
        weight: address of the struct that describes the weight to it; valid for the lifetime of this object.
    """

    def __init__(self, function: Any, shape: Iterable[int], held: Structure) -> None:
        self._multiply, self._held = function, held
        self.out_size, self.in_size = shape
        self.function, self.weight = cast(function, c_void_p).value, addressof(held)

    @property
    def most_rows(self) -> int:
        """The largest number of rows that the C++ GEMM accepts."""
        return _ANY_ROWS

    @property
    def takes_any_rows(self) -> bool:
        """Whether the C++ GEMM accepts any number of rows."""
        return self.most_rows == _ANY_ROWS

    def linear(self, x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        """Return x @ weight.T + bias + residual, [T, out]."""
        x, out = x.contiguous(), x.new_empty(len(x), self.out_size)
        residual = None if residual is None else residual.contiguous()
        self._multiply(self.weight, *addresses(x, bias, residual, out), len(x), 0)
        return out

    def logits(self, x: Tensor) -> Tensor:
        """Return x @ weight.T in the accumulation type, float32, [T, out]."""
        x, out = x.contiguous(), x.new_empty(len(x), self.out_size, dtype=torch.float32)
        self._multiply(self.weight, *addresses(x, None, None, out), len(x), 1)
        return out


class PackedMatrix(Structure):
    """`Packed` of `packed.cpp`."""

    _fields_ = (("weight", c_void_p), *((name, c_int64) for name in ("inputs", "outputs", "form")))
