"""Linear-layer weights prepacked for oneDNN's GEMMs on a CPU.

torch's own GEMM reads them unpacked, or packs them at every call. With prepacked weights a GEMM of 256 rows takes half
the time, and one of 8 rows a third (`docs/performance.md`). The original weight is freed.

Few rows use our own GEMM (`packed.cpp`) on oneDNN's layout. It overlaps reading the weights with computing, which take
about as long; oneDNN takes up to 1.4 times as long, in float32 and in bfloat16. With AMX, bfloat16 weights use
`tiled.py` instead.
"""

from __future__ import annotations

import os
from ctypes import c_int32

import torch
from torch import Tensor

from .cpp_library import ELEMENTS, find
from .cpp_product import PACKED, CppProduct, PackedMatrix
from .tiled import TiledWeight, can_tile

# oneDNN compiles a primitive per number of rows and weight shape: half a millisecond and about a megabyte each. By
# default it caches 1,024 of them. It reads this variable when it compiles the first one.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")

_TYPICAL_ROWS = 256  # for which oneDNN chooses the layout; GEMMs with other numbers of rows use it too
# Limits of our GEMM, by type and outputs per block; for more rows oneDNN is as fast. oneDNN uses blocks of 32 with AMX.
_MOST_ROWS = {(torch.float32, 64): 64, (torch.bfloat16, 64): 64, (torch.bfloat16, 32): 4}
_OUTPUTS = 64  # that our GEMM computes at a time
_BLOCKS_A_THREAD = 4  # minimum, to balance threads


class PackedWeight(CppProduct):
    """A weight [out, in] in oneDNN's layout."""

    def __init__(self, weight: Tensor) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL_ROWS)
        self._dtype, (out_size, in_size) = weight.dtype, weight.shape
        self._block = _find_block(self._packed, weight)
        library = find(PACKED, weight.dtype)
        held = PackedMatrix(torch.ops.mkldnn.data_ptr(self._packed), in_size, out_size, self._block)
        super().__init__(None if library is None else library.linear, weight.shape, held)
        self._most_rows = _MOST_ROWS.get((weight.dtype, self._block), 0)

    @property
    def most_rows(self) -> int:
        """The largest number of rows for which our GEMM is faster; 0 if the weight is too small for all threads."""
        has_enough = self.out_size >= _BLOCKS_A_THREAD * _OUTPUTS * torch.get_num_threads()
        return self._most_rows if has_enough else 0

    def linear(self, x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        """Return x @ weight.T + bias + residual, [T, out]."""
        if not len(x):
            return x.new_zeros(0, self.out_size)
        if len(x) <= self.most_rows:
            return super().linear(x, bias, residual)
        if residual is None:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")
        else:
            out = torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._packed, bias, "add")
        return out

    @property
    def can_be_read(self) -> bool:
        """Whether `rows` may be called: oneDNN's layout is known."""
        return self._block > 0

    def rows(self, ids: Tensor) -> Tensor:
        """Return the weight's rows, [T, in]."""
        words = _words(self._packed, self.out_size, self._block)
        return words[ids // self._block, :, ids % self._block].view(self._dtype)


def _words(packed: Tensor, outputs: int, block: int) -> Tensor:
    """Return a packed weight in 4-byte words of one or two elements, [outputs / block, words, block]."""
    count = torch.ops.mkldnn._nbytes(packed) // 4
    buffer = (c_int32 * count).from_address(torch.ops.mkldnn.data_ptr(packed))
    return torch.frombuffer(buffer, dtype=torch.int32).view(-1, count // outputs, block)


def _find_block(packed: Tensor, weight: Tensor) -> int:
    """Return the outputs per block of the packed weight; 0 if our GEMM is unavailable or cannot read the layout.

    oneDNN guarantees no layout, so the first and the last block are compared with the original weight.
    """
    outputs, inputs = weight.shape
    if outputs % _OUTPUTS or inputs * weight.itemsize % 4:
        return 0
    if torch.ops.mkldnn._nbytes(packed) != weight.numel() * weight.itemsize or find(PACKED, weight.dtype) is None:
        return 0
    for block in (64, 32):
        found, own = _words(packed, outputs, block), weight.view(torch.int32).unflatten(0, (-1, block)).transpose(1, 2)
        if all(found[at].equal(own[at]) for at in (0, -1)):
            return block
    return 0


def can_pack(weight: Tensor) -> bool:
    """Return whether oneDNN is available and faster for the weight's device and type."""
    if weight.device.type != "cpu" or weight.dtype not in ELEMENTS or not torch.backends.mkldnn.is_available():
        return False
    return weight.dtype != torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack(weight: Tensor, *, is_table: bool = False) -> PackedWeight | TiledWeight | None:
    """Pack a weight for the processor's GEMMs; None if torch's own has to be used.

    `is_table`: a tied embedding and LM head, whose rows are read out of the packed blocks. In bfloat16 a packed GEMM of
    1 to 64 rows takes 0.5 to 0.8 of the unpacked one's time (49,152 x 576, a core with AMX). In float32 a tied weight
    stays unpacked (`row_weight.py`), which is as fast up to 16 rows.
    """
    if can_tile(weight):
        return TiledWeight(weight.detach())
    if not can_pack(weight) or (is_table and weight.dtype != torch.bfloat16):
        return None
    packed = PackedWeight(weight.detach())
    return packed if packed.can_be_read or not is_table else None
