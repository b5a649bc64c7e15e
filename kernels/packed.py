"""Weights of linear layers that are laid out once for oneDNN's products on a CPU.

torch's own product reads them as they lie, or packs them at every call. With packed weights a product of 256 rows takes
half the time, and one of 8 rows a third (`docs/performance.md`). The weight as it was loaded goes, so that none is held
twice.

Few rows have a product of our own (`packed.cpp`), which reads oneDNN's layout: reading the weights takes about as long
as computing with them, and it does both at once. oneDNN takes up to 1.4 times as long, in float32 and in bfloat16.
Weights of bfloat16 have products of their own where there is AMX (`tiled.py`).
"""

from __future__ import annotations

import os
from ctypes import CDLL, c_int32

import torch
from torch import Tensor

from .cpp_library import ELEMENTS, find
from .cpp_product import ARGUMENTS, CppProduct, PackedMatrix
from .tiled import TiledWeight, can_tile

# oneDNN makes code for each number of rows and shape of weight that it meets, half a millisecond and about a megabyte.
# By itself it keeps 1,024 of them. It reads this when it first makes one.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")

_TYPICAL_ROWS = 256  # oneDNN chooses the layout for a number of rows; products of others use it too
# Of our product, by type and outputs of a block; for more, oneDNN's is as fast. It has blocks of 32 where it uses AMX.
_MOST_ROWS = {(torch.float32, 64): 64, (torch.bfloat16, 64): 64, (torch.bfloat16, 32): 4}
_OUTPUTS = 64  # that our product computes at a time
_BLOCKS_A_THREAD = 4  # at least, so that threads have about as many each


class PackedWeight(CppProduct):
    """A weight [out, in] in oneDNN's layout."""

    def __init__(self, weight: Tensor) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL_ROWS)
        self._dtype, (out_size, in_size) = weight.dtype, weight.shape
        self._block = _find_block(self._packed, weight)
        library = _library(weight.dtype)
        held = PackedMatrix(torch.ops.mkldnn.data_ptr(self._packed), in_size, out_size, self._block)
        super().__init__(None if library is None else library.linear, weight.shape, held)
        self._most_rows = _MOST_ROWS.get((weight.dtype, self._block), 0)

    @property
    def most_rows(self) -> int:
        """The rows up to which our product is sooner; 0 where there is not enough for all threads."""
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
        """Whether `rows` may be called: oneDNN's layout is one that is known."""
        return self._block > 0

    def rows(self, ids: Tensor) -> Tensor:
        """Return the weight's rows, [T, in]."""
        words = _words(self._packed, self.out_size, self._block)
        return words[ids // self._block, :, ids % self._block].view(self._dtype)


def _library(dtype: torch.dtype) -> CDLL | None:
    return find("packed", dtype, linear=ARGUMENTS)


def _words(packed: Tensor, outputs: int, block: int) -> Tensor:
    """Return a packed weight in words of 4 bytes, which are one number or two, [outputs / block, words, block]."""
    count = torch.ops.mkldnn._nbytes(packed) // 4
    buffer = (c_int32 * count).from_address(torch.ops.mkldnn.data_ptr(packed))
    return torch.frombuffer(buffer, dtype=torch.int32).view(-1, count // outputs, block)


def _find_block(packed: Tensor, weight: Tensor) -> int:
    """Return the outputs of a block of the packed weight; 0 where our product is not there or cannot read the layout.

    oneDNN does not promise a layout, so the first and the last block are compared with the weight itself.
    """
    outputs, inputs = weight.shape
    if outputs % _OUTPUTS or inputs * weight.itemsize % 4:
        return 0
    if torch.ops.mkldnn._nbytes(packed) != weight.numel() * weight.itemsize or _library(weight.dtype) is None:
        return 0
    for block in (64, 32):
        found, own = _words(packed, outputs, block), weight.view(torch.int32).unflatten(0, (-1, block)).transpose(1, 2)
        if all(found[at].equal(own[at]) for at in (0, -1)):
            return block
    return 0


def can_pack(weight: Tensor) -> bool:
    """Return whether oneDNN runs, and gains, on the weight's device and with its type."""
    if weight.device.type != "cpu" or weight.dtype not in ELEMENTS or not torch.backends.mkldnn.is_available():
        return False
    return weight.dtype != torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack(weight: Tensor, *, is_table: bool = False) -> PackedWeight | TiledWeight | None:
    """Lay a weight out for the processor's products; None where torch's own must do.

    A table is an embedding that is the LM head too: the head multiplies with it, and rows are read out of the blocks.
    In bfloat16 a product of 1 to 64 rows takes 0.5 to 0.8 of the time of the one that reads the weight as it was loaded
    (49,152 x 576, a core with AMX), which stays for float32 (`row_weight.py`): up to 16 rows that one is as fast.
    """
    if can_tile(weight):
        return TiledWeight(weight.detach())
    if not can_pack(weight) or (is_table and weight.dtype != torch.bfloat16):
        return None
    packed = PackedWeight(weight.detach())
    return packed if packed.can_be_read or not is_table else None
