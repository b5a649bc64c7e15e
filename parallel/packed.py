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
from collections.abc import Callable
from ctypes import POINTER, c_int32, c_int64, c_void_p, cast
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .cpp_library import ELEMENTS, NoLibraryError, load
from .tiled import TiledWeight, can_tile

# oneDNN makes code for each number of rows and shape of weight that it meets, half a millisecond and about a megabyte.
# By itself it keeps 1,024 of them. It reads this when it first makes one.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")

_TYPICAL_ROWS = 256  # oneDNN chooses the layout for a number of rows; products of others use it too
# Of our product, by type and outputs of a block; for more, oneDNN's is as fast. It has blocks of 32 where it uses AMX.
_MOST_ROWS = {(torch.float32, 64): 64, (torch.bfloat16, 64): 64, (torch.bfloat16, 32): 4}
_OUTPUTS = 64  # that our product computes at a time
_BLOCKS_A_THREAD = 4  # at least, so that threads have about as many each


class PackedWeight:
    """A weight [out, in] in oneDNN's layout."""

    def __init__(self, weight: Tensor) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL_ROWS)
        self._out_size, self._in_size = weight.shape
        self._block = _find_block(self._packed, weight)
        self._most_rows = _MOST_ROWS.get((weight.dtype, self._block), 0)

    def linear(self, x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        """Return x @ weight.T + bias + residual, [T, out]."""
        if not len(x):
            return x.new_zeros(0, self._out_size)
        if len(x) <= self._most_rows and self._has_work_for_all_threads:
            return self._few_rows(x, bias, residual)
        if residual is None:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")
        else:
            out = torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._packed, bias, "add")
        return out

    @property
    def _has_work_for_all_threads(self) -> bool:
        return self._out_size >= _BLOCKS_A_THREAD * _OUTPUTS * torch.get_num_threads()

    def _few_rows(self, x: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        x, out = x.contiguous(), x.new_empty(len(x), self._out_size)
        if residual is not None:
            residual = residual.contiguous()
        _product(x.dtype)(
            x.data_ptr(),
            torch.ops.mkldnn.data_ptr(self._packed),
            None if bias is None else bias.data_ptr(),
            None if residual is None else residual.data_ptr(),
            out.data_ptr(),
            len(x),
            self._in_size,
            self._out_size,
            self._block,
        )
        return out


@cache
def _product(dtype: torch.dtype) -> Callable[..., Any]:
    """Return the product of few rows.

    Raises:
        NoLibraryError: it cannot be compiled here.
    """
    product = load(Path(__file__).with_suffix(".cpp"), dtype).linear
    product.argtypes = (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int64)
    product.restype = None
    return product


def _find_block(packed: Tensor, weight: Tensor) -> int:
    """Return the outputs of a block of the packed weight; 0 where our product is not there or cannot read the layout.

    oneDNN does not promise a layout, so the first and the last block are compared with the weight itself, in words of 4
    bytes, which are one number or two.
    """
    outputs, inputs = weight.shape
    if outputs % _OUTPUTS or inputs * weight.itemsize % 4:
        return 0
    if torch.ops.mkldnn._nbytes(packed) != weight.numel() * weight.itemsize:
        return 0
    try:
        _product(weight.dtype)
    except NoLibraryError:
        return 0
    words = weight.detach().view(torch.int32).numpy()
    address = cast(torch.ops.mkldnn.data_ptr(packed), POINTER(c_int32))
    for block in (64, 32):
        values = np.ctypeslib.as_array(address, (outputs // block, words.shape[1], block))
        own = words.reshape(-1, block, words.shape[1]).transpose(0, 2, 1)
        if all(np.array_equal(values[at], own[at]) for at in (0, -1)):
            return block
    return 0


def can_pack(weight: Tensor) -> bool:
    """Return whether oneDNN runs, and gains, on the weight's device and with its type."""
    if weight.device.type != "cpu" or weight.dtype not in ELEMENTS or not torch.backends.mkldnn.is_available():
        return False
    return weight.dtype != torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack(weight: Tensor) -> PackedWeight | TiledWeight | None:
    """Lay a weight out for the processor's products; None where torch's own must do."""
    if can_tile(weight):
        return TiledWeight(weight.detach())
    return PackedWeight(weight.detach()) if can_pack(weight) else None


def take_packed(linear: nn.Module) -> PackedWeight | TiledWeight | None:
    """Pack a layer's weight and free it; None, and the layer as it is, where that cannot be."""
    weight: Tensor = linear.weight  # type: ignore[assignment]
    packed = pack(weight)
    if packed is None:
        return None
    linear.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)
    return packed
