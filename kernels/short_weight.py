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
from .cpp_library import ELEMENTS, find
from .cpp_product import ARGUMENTS, CppProduct, PackedMatrix
from .processor import multiplies_bfloat16
from .weight_format import WeightFormat

_OUTPUTS = 64  # of a block
_TYPES = (torch.bfloat16, torch.float16)


class ShortWeight(CppProduct):
    """A weight [out, in] of 16 bits for activations of another type, in blocks of 64 outputs side by side."""

    def __init__(self, weight: Tensor, dtype: torch.dtype, library: CDLL) -> None:
        out_size, in_size = weight.shape
        self._dtype = dtype
        blocks = F.pad(weight, (0, 0, 0, -out_size % _OUTPUTS)).unflatten(0, (-1, _OUTPUTS))
        self._blocks = huge_pages.copy(blocks.transpose(1, 2))  # [blocks, in, 64]
        held = PackedMatrix(self._blocks.data_ptr(), in_size, out_size, weight.dtype == torch.float16)
        super().__init__(library.linear_short, weight.shape, held)

    def rows(self, ids: Tensor) -> Tensor:
        """Return the weight's rows, [T, in]."""
        return self._blocks[ids // _OUTPUTS, :, ids % _OUTPUTS].to(self._dtype)


def short_type(format: WeightFormat) -> torch.dtype | None:
    """Return the type of numbers of 16 bits; None where a format has others."""
    return (torch.float16 if format.is_half else torch.bfloat16) if format.bits == 16 else None


def keep_short(weight: Tensor, dtype: torch.dtype) -> ShortWeight | None:
    """Lay a weight of 16 bits out for activations of `dtype`; None where another product is as good, or must do."""
    if weight.device.type != "cpu" or weight.dtype not in _TYPES or dtype not in ELEMENTS or multiplies_bfloat16():
        return None
    library = find("packed", dtype, linear_short=ARGUMENTS)
    return None if library is None else ShortWeight(weight.detach(), dtype, library)
