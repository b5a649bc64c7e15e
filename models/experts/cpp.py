"""The products of experts in C++, for float32 and bfloat16 on a CPU: one call for all experts of a layer."""

from __future__ import annotations

from ctypes import c_float, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...parallel.cpp_library import ELEMENTS, NoLibraryError, load
from .activation import GatedActivation

_BLOCK = 16  # outputs whose words lie side by side
_WORDS = 16  # of which a row has a multiple
_POINTER, _SIZE, _NUMBER = c_void_p, c_int64, c_float


def runs_here(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether the library can be had for tensors of this type on this device."""
    if device.type != "cpu" or dtype not in ELEMENTS:
        return False
    try:
        _function(dtype)
    except NoLibraryError:
        return False
    return True


@cache
def _function(dtype: torch.dtype) -> Any:
    function = load(Path(__file__).with_name("experts.cpp"), dtype).experts
    function.argtypes = (
        *(_POINTER, _SIZE, _SIZE),
        *(_POINTER, _POINTER, _SIZE, _SIZE, _SIZE),
        *(_POINTER,) * 4,
        *(_SIZE,) * 3,
        *(_NUMBER,) * 3,
        *(_POINTER, _POINTER, _SIZE),
    )
    function.restype = None
    return function


class PackedExperts:
    """The weights of E experts in the layout of `experts.cpp`.

    Args:
        gate_up: [E, 2 F, H], of each expert the gate's rows and then those of the up projection.
        down: [E, H, F].
        gate_up_bias: [E, 2 F] or None.
        down_bias: [E, H] or None.
        activation: of the gate and the up projection.
    """

    def __init__(
        self,
        gate_up: Tensor,
        down: Tensor,
        gate_up_bias: Tensor | None,
        down_bias: Tensor | None,
        activation: GatedActivation,
    ) -> None:
        E, H, self._width = down.shape
        halves = gate_up.view(E, 2, self._width, H)
        in_word = 4 // gate_up.itemsize
        self._words = _padded(-(-H // in_word), _WORDS)
        self._inner_words = _padded(self._width, 2 * _BLOCK) // in_word
        # The blocks of the gate and of the up projection take turns, so that one panel has both of some inner columns.
        self._gate_up = _pack(halves, 2 * _BLOCK, self._words).transpose(1, 2).contiguous()
        self._down = _pack(down[:, None], 4 * _BLOCK, self._inner_words)
        self._biases = gate_up_bias, down_bias
        self._activation = activation
        self._amx = int(gate_up.dtype == torch.bfloat16 and _has_amx())

    def __call__(
        self, x_TH: Tensor, picked_Tk: Tensor, weights_Tk: Tensor, first: int, residual: Tensor | None
    ) -> Tensor:
        """See `RoutedExperts.forward`."""
        x_TH, picked_Tk, weights_Tk = x_TH.contiguous(), picked_Tk.contiguous(), weights_Tk.contiguous()
        out = torch.empty_like(x_TH)
        gate_up_bias, down_bias = (None if bias is None else bias.data_ptr() for bias in self._biases)
        activation = self._activation
        _function(x_TH.dtype)(
            x_TH.data_ptr(),
            *x_TH.shape,
            picked_Tk.data_ptr(),
            weights_Tk.data_ptr(),
            picked_Tk.shape[1],
            first,
            len(self._down),
            self._gate_up.data_ptr(),
            self._down.data_ptr(),
            gate_up_bias,
            down_bias,
            self._width,
            self._words,
            self._inner_words,
            activation.factor,
            activation.limit,
            activation.shift,
            None if residual is None else residual.contiguous().data_ptr(),
            out.data_ptr(),
            self._amx,
        )
        return out


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _pack(weight: Tensor, outputs: int, words: int) -> Tensor:
    """Return matrices [E, n, out, in] in blocks of words, [E, n, blocks, words, 16] int32.

    Outputs are padded to a multiple of `outputs`, and inputs to `words`, with zeros.
    """
    E, n, out, size = weight.shape
    blocks = _padded(out, outputs) // _BLOCK
    packed = torch.empty(E, n, blocks, words, _BLOCK, dtype=torch.int32)
    for expert, to in zip(weight, packed, strict=True):
        own = weight.new_zeros(n, blocks * _BLOCK, words * 4 // weight.itemsize)
        own[:, :out, :size] = expert
        to.copy_(own.view(torch.int32).view(n, blocks, _BLOCK, words).transpose(2, 3))
    return packed


@cache
def _has_amx() -> bool:
    """Return whether this process may use the processor's matrix tiles for bfloat16."""
    return bool(torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx())
