"""bfloat16 weights packed for AMX tiles.

The GEMM (`packed.cpp`) accepts any number of rows. oneDNN compiles a primitive for each number of rows and weight
shape, about 30 ms each, and micro-batches of chunks and decodes rarely repeat a number of rows. Compared with oneDNN,
32 requests took three quarters of the time. The GEMM alone is as fast for 256 rows, and takes three quarters of the
time for 32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import huge_pages
from .cpp_library import find_tiled
from .cpp_product import PACKED, CppProduct, PackedMatrix

_SIZE = 32  # outputs per block, and inputs per tile


class TiledWeight(CppProduct):
    """A weight [out, in] in blocks of 32 outputs, laid out [blocks, pairs of inputs, 32 outputs]."""

    def __init__(self, weight: Tensor) -> None:
        out_size, in_size = weight.shape
        pairs = weight.contiguous().view(torch.int32).unflatten(0, (-1, _SIZE))
        self._pairs = huge_pages.copy(pairs.transpose(1, 2))  # [out / 32, in / 2, 32]
        library = find_tiled(PACKED)
        assert library is not None
        self._gated = library.gated_silu_tiled
        super().__init__(library.linear_tiled, weight.shape, PackedMatrix(self._pairs.data_ptr(), in_size, out_size))

    def gated_silu(self, x: Tensor) -> Tensor:
        """Return silu(x @ gate.T) * (x @ up.T), [T, out / 2], for a weight [gate; up] whose halves are whole blocks."""
        x, size = x.contiguous(), self.out_size // 2
        assert size % _SIZE == 0
        out = x.new_empty(len(x), size)
        self._gated(x.data_ptr(), self._pairs.data_ptr(), out.data_ptr(), *x.shape, size)
        return out

    @property
    def has_whole_halves(self) -> bool:
        """Whether `gated_silu` may be called."""
        return self.out_size % (2 * _SIZE) == 0

    def rows(self, ids: Tensor) -> Tensor:
        """Return the weight's rows, [T, in]."""
        return self._pairs[ids // _SIZE, :, ids % _SIZE].view(torch.bfloat16)


def can_tile(weight: Tensor) -> bool:
    """Return whether the processor has AMX, and the weight's sizes are multiples of its tiles."""
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or any(size % _SIZE for size in weight.shape):
        return False
    return find_tiled(PACKED) is not None
