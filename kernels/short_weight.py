"""16-bit weights, bfloat16 or float16, on a processor without native 16-bit multiplication.

They stay in 16 bits and are widened in registers, or once for many rows (`packed.cpp`). So GEMMs of few rows read half
of the bytes, and no weight is rounded.
"""

from __future__ import annotations

from ctypes import CDLL

import torch
import torch.nn.functional as F
from torch import Tensor

from . import huge_pages
from .cpp_library import ELEMENTS, find
from .cpp_product import PACKED, CppProduct, PackedMatrix
from .processor import multiplies_bfloat16
from .weight_format import WeightFormat

_OUTPUTS = 64  # per block
_TYPES = (torch.bfloat16, torch.float16)


class ShortWeight(CppProduct):
    """A 16-bit weight [out, in] for activations of another type, in blocks of 64 adjacent outputs."""

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
    """Return the torch type of a 16-bit format; None for other formats."""
    return (torch.float16 if format.is_half else torch.bfloat16) if format.bits == 16 else None


def keep_short(weight: Tensor, dtype: torch.dtype) -> ShortWeight | None:
    """Pack a 16-bit weight for activations of `dtype`; None if another GEMM is as fast, or has to be used."""
    if weight.device.type != "cpu" or weight.dtype not in _TYPES or dtype not in ELEMENTS or multiplies_bfloat16():
        return None
    library = find(PACKED, dtype)
    return None if library is None else ShortWeight(weight.detach(), dtype, library)
