"""Grouped expert GEMMs in C++, for float32 and bfloat16 activations on a CPU: one call for all experts of a layer.

Weights have the activations' type, or are quantized or 16-bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_void_p
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import huge_pages
from .cpp_library import ELEMENTS, CppFile, addresses, find
from .cpp_product import CppProduct
from .gated_activation import GatedActivation

_ROUTED, _REST = "piippiiii", "fffpp"
_EXPERTS = CppFile("experts", experts=_ROUTED + 4 * "p" + _REST, separate_experts=_ROUTED + 5 * "p" + _REST)
_BLOCK = 32  # outputs whose words are adjacent; inputs are padded to a multiple of it
_Bias = Tensor | None


def runs_here(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether the library is available for tensors of this type on this device."""
    return device.type == "cpu" and dtype in ELEMENTS and find(_EXPERTS, dtype) is not None


class CppExperts:
    """The weights of E experts in a layout of `experts.cpp`.

    Args:
        name: the C++ function's name.
        weights: the function's arguments that describe the weights; the caller keeps the weights alive.
        gate_up_bias: [E, 2 F] or None.
        down_bias: [E, H] or None.
        activation: the gated activation function.
    """

    def __init__(
        self, name: str, weights: Sequence[Any], gate_up_bias: _Bias, down_bias: _Bias, activation: GatedActivation
    ) -> None:
        self._name = name
        self._biases = gate_up_bias, down_bias
        self._arguments = (*weights, *addresses(*self._biases), activation.factor, activation.limit, activation.shift)

    def __call__(
        self, x_TH: Tensor, picked_Tk: Tensor, weights_Tk: Tensor, first: int, residual: Tensor | None
    ) -> Tensor:
        """See `RoutedExperts.forward`."""
        x_TH, picked_Tk, weights_Tk = x_TH.contiguous(), picked_Tk.contiguous(), weights_Tk.contiguous()
        residual = None if residual is None else residual.contiguous()
        out = torch.empty_like(x_TH)
        x, *picks = addresses(x_TH, picked_Tk, weights_Tk)
        routed = (x, *x_TH.shape, *picks, picked_Tk.shape[1], first)
        getattr(find(_EXPERTS, x_TH.dtype), self._name)(*routed, *self._arguments, *addresses(residual, out))
        return out


class PackedExperts(CppExperts):
    """Weights of the activations' type, packed in 32-bit words.

    Args:
        gate_up: [E, 2 F, H], per expert the gate's rows and then the up projection's rows.
        down: [E, H, F].
        gate_up_bias, down_bias, activation: see `CppExperts`.
    """

    def __init__(
        self, gate_up: Tensor, down: Tensor, gate_up_bias: _Bias, down_bias: _Bias, activation: GatedActivation
    ) -> None:
        E, H, width = down.shape
        # Interleave gate and up blocks, so that one panel has both for the same inner columns.
        self._gate_up = huge_pages.copy(pack_words(gate_up.view(E, 2, width, H), _BLOCK).transpose(1, 2))
        self._down = huge_pages.copy(pack_words(down[:, None], 2 * _BLOCK))
        if gate_up_bias is not None:
            halves = _padded(gate_up_bias.float().view(E, 2, width), _BLOCK)
            gate_up_bias = halves.unflatten(2, (-1, _BLOCK)).transpose(1, 2).contiguous()
        if down_bias is not None:
            down_bias = _padded(down_bias.float(), 2 * _BLOCK)
        weights = (E, width, self._gate_up.data_ptr(), self._down.data_ptr())
        super().__init__("experts", weights, gate_up_bias, down_bias, activation)


class SeparateExperts(CppExperts):
    """Quantized or 16-bit weights, each packed on its own for the GEMM that dense layers use.

    Args:
        gate_up: per expert, [2 F, H].
        down: per expert, [H, F].
        more: see `CppExperts`.
    """

    def __init__(
        self,
        gate_up: Sequence[CppProduct],
        down: Sequence[CppProduct],
        *more: *tuple[_Bias, _Bias, GatedActivation],
    ) -> None:
        self._held = gate_up, down
        assert {own.function for own in (*gate_up, *down)} == {down[0].function}
        of_each = ((c_void_p * len(each))(*(own.weight for own in each)) for each in self._held)
        super().__init__("separate_experts", (len(down), down[0].in_size, down[0].function, *of_each), *more)


def _padded(x: Tensor, multiple: int) -> Tensor:
    """Pad the last dimension with zeros to a multiple."""
    return F.pad(x, (0, -x.shape[-1] % multiple))


def pack_words(weight: Tensor, outputs: int) -> Tensor:
    """Pack matrices [E, n, out, in] into blocks of words, [E, n, blocks, words, 32] int32.

    Outputs are zero-padded to a multiple of `outputs`, inputs to a multiple of 32.
    """
    packed = []
    for expert in weight:
        own = _padded(_padded(expert, _BLOCK).transpose(1, 2), outputs).transpose(1, 2)
        packed.append(own.contiguous().view(torch.int32).unflatten(1, (-1, _BLOCK)).transpose(2, 3))
    return torch.stack(packed)
