"""Weights of linear layers that are laid out once for oneDNN's products on a CPU.

torch's own product reads them as they lie, or packs them at every call. With packed weights a product of 256 rows takes
half the time, and one of 8 rows a third (`docs/performance.md`). The weight as it was loaded goes, so that none is held
twice.

Few rows have a product of our own (`packed.cpp`), which reads oneDNN's layout: reading the weights takes about as long
as computing with them, and it does both at once. oneDNN takes up to 1.4 times as long.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from ctypes import POINTER, c_float, c_int64, c_void_p, cast
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from .cpp_library import NoLibraryError, load

# oneDNN makes code for each number of rows and shape of weight that it meets, half a millisecond and about a megabyte.
# By itself it keeps 1,024 of them. It reads this when it first makes one.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")

_TYPICAL_ROWS = 256  # oneDNN chooses the layout for a number of rows; products of others use it too
_FEW_ROWS = 64  # from there on oneDNN's product is as fast
_OUTPUTS = 64  # of a block of the layout that our product reads
_BLOCKS_A_THREAD = 4  # at least, so that threads have about as many each


class PackedWeight:
    """A weight [out, in] in oneDNN's layout."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL_ROWS)
        self._out_size, self._in_size = weight.shape
        self._address = _address(self._packed, weight)

    def linear(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return x @ weight.T + bias + residual, [T, out]."""
        if not len(x):
            return x.new_zeros(0, self._out_size)
        if self._address is not None and len(x) <= _FEW_ROWS and self._has_work_for_all_threads:
            return self._few_rows(x, bias, residual)
        if residual is None:
            out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")
        else:
            out = torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._packed, bias, "add")
        return out

    @property
    def _has_work_for_all_threads(self) -> bool:
        return self._out_size >= _BLOCKS_A_THREAD * _OUTPUTS * torch.get_num_threads()

    def _few_rows(self, x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None) -> torch.Tensor:
        x, out = x.contiguous(), x.new_empty(len(x), self._out_size)
        if residual is not None:
            residual = residual.contiguous()
        _product()(
            x.data_ptr(),
            self._address,
            None if bias is None else bias.data_ptr(),
            None if residual is None else residual.data_ptr(),
            out.data_ptr(),
            len(x),
            self._in_size,
            self._out_size,
        )
        return out


@cache
def _product() -> Callable[..., Any]:
    """Return the product of few rows.

    Raises:
        NoLibraryError: it cannot be compiled here.
    """
    product = load(Path(__file__).with_suffix(".cpp")).linear
    product.argtypes = (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64)
    product.restype = None
    return product


def _address(packed: torch.Tensor, weight: torch.Tensor) -> int | None:
    """Return where the packed weight lies; None where our product cannot be had or does not know its layout.

    oneDNN does not promise a layout, so the first and the last block are compared with the weight itself.
    """
    outputs, inputs = weight.shape
    if outputs % _OUTPUTS or torch.ops.mkldnn._nbytes(packed) != weight.numel() * weight.element_size():
        return None
    try:
        _product()
    except NoLibraryError:
        return None
    address: int = torch.ops.mkldnn.data_ptr(packed)
    values = np.ctypeslib.as_array(cast(address, POINTER(c_float)), (outputs // _OUTPUTS, inputs, _OUTPUTS))
    for block in (0, -1):
        own = weight.detach().reshape(-1, _OUTPUTS, inputs)[block].t()
        if not np.array_equal(values[block], own.numpy(), equal_nan=True):
            return None
    return address


def take_packed(linear: nn.Module) -> PackedWeight | None:
    """Pack a layer's weight and free it; None, and the layer as it is, where oneDNN does not run or does not gain."""
    weight = linear.weight
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or not torch.backends.mkldnn.is_available():
        return None
    packed = PackedWeight(weight.detach())
    linear.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)
    return packed
