"""Weights of 16 bits, bfloat16 or float16, on a processor that does not multiply them as they are.

They stay in two bytes and are widened in registers, or once for many rows (`packed.cpp`), so that few rows read half of
the bytes and no number is rounded.
"""

from __future__ import annotations

from ctypes import CDLL

import torch
import torch.nn.functional as F
from torch import Tensor

from . import huge_pages
from .cpp_library import ELEMENTS, addresses, find
from .processor import multiplies_bfloat16

_OUTPUTS = 64  # of a block
_TYPES = (torch.bfloat16, torch.float16)


class ShortWeight:
    """A weight [out, in] of 16 bits for activations of another type, in blocks of 64 outputs side by side."""

    def __init__(self, weight: Tensor, dtype: torch.dtype, library: CDLL) -> None:
        self._out_size, self._in_size = weight.shape
        self._type, self._dtype, self._linear = weight.dtype, dtype, library.linear_short
        blocks = F.pad(weight, (0, 0, 0, -self._out_size % _OUTPUTS)).unflatten(0, (-1, _OUTPUTS))
        self._blocks = huge_pages.copy(blocks.transpose(1, 2))  # [blocks, in, 64]

    def linear(self, x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        """Return x @ weight.T + bias + residual, [T, out]."""
        return self._multiply(x, bias, residual, x.new_empty(len(x), self._out_size))

    def logits(self, x: Tensor) -> Tensor:
        """Return x @ weight.T as it was summed, float32, [T, out]."""
        return self._multiply(x, None, None, x.new_empty(len(x), self._out_size, dtype=torch.float32))

    def _multiply(self, x: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor) -> Tensor:
        x, residual = x.contiguous(), None if residual is None else residual.contiguous()
        given = addresses(x, self._blocks, bias, residual, out)
        sizes = (len(x), self._in_size, self._out_size)
        self._linear(*given, *sizes, self._type == torch.float16, out.dtype == torch.float32)
        return out

    def rows(self, ids: Tensor) -> Tensor:
        """Return the weight's rows, [T, in]."""
        return self._blocks[ids // _OUTPUTS, :, ids % _OUTPUTS].to(self._dtype)


def keep_short(weight: Tensor, dtype: torch.dtype) -> ShortWeight | None:
    """Lay a weight of 16 bits out for activations of `dtype`; None where another product is as good, or must do."""
    if weight.device.type != "cpu" or weight.dtype not in _TYPES or dtype not in ELEMENTS or multiplies_bfloat16():
        return None
    library = find("packed", dtype, linear_short=5 * "p" + 5 * "i")
    return None if library is None else ShortWeight(weight.detach(), dtype, library)
