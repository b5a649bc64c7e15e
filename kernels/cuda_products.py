"""Quantized GEMMs on CUDA, by torch's own operators.

If none fits, the weight stays quantized and is dequantized at each GEMM, one layer at a time.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .quantized_matrix import QuantizedMatrix
from .weight_format import WeightFormat

_ALIGNMENT = 16  # of outputs and inputs, for 8-bit GEMMs
_LEAST_ROWS = 32  # `_int_mm` takes more than 16
_TILES = 8  # tiles of 16 inputs that `_weight_int4pack_mm` reads at once
_GROUPS = (32, 64, 128, 256)  # group sizes that it supports
_E4M3_MOST = torch.finfo(torch.float8_e4m3fn).max


class KeptMatrix:
    """A quantized matrix that is dequantized at each GEMM."""

    def __init__(self, matrix: QuantizedMatrix, dtype: torch.dtype) -> None:
        self._matrix, self._dtype = matrix, dtype

    def linear(self, x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        """Return x @ weight.T + bias + residual, [T, out]."""
        return _added(F.linear(x, self._matrix.dequantized().to(self._dtype), bias), None, residual)

    def rows(self, ids: Tensor) -> Tensor:
        """Return the weight's rows, [T, in]."""
        of = self._matrix
        offsets = None if of.offsets is None else of.offsets[ids]
        return QuantizedMatrix(of.format, of.codes[ids], of.scales[ids], offsets).dequantized().to(self._dtype)


class Float8Weight:
    """FP8 (E4M3) with one scale per output; activations are quantized to E4M3 with one scale per token."""

    def __init__(self, matrix: QuantizedMatrix, dtype: torch.dtype) -> None:
        self._weight = matrix.codes.view(torch.float8_e4m3fn).t()
        self._scales = matrix.scales.t().contiguous()

    def linear(self, x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        """Return x @ weight.T + bias + residual, [T, out]."""
        scale = _largest(x) / _E4M3_MOST
        rounded = (x.float() / scale).clamp_(-_E4M3_MOST, _E4M3_MOST).to(torch.float8_e4m3fn)
        out = torch._scaled_mm(rounded, self._weight, scale_a=scale, scale_b=self._scales, out_dtype=x.dtype)
        return _added(out, bias, residual)


class Int8Weight:
    """INT8 with one scale per output; activations are quantized to 8 bits with one scale per token (W8A8)."""

    def __init__(self, matrix: QuantizedMatrix, dtype: torch.dtype) -> None:
        self._weight = (matrix.codes ^ matrix.format.zero).view(torch.int8).t()
        self._scales = matrix.scales.flatten()

    def linear(self, x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        """Return x @ weight.T + bias + residual, [T, out]."""
        scale = _largest(x) / 127.5
        rounded = (x.float() / scale).round_().clamp_(-128, 127).to(torch.int8)
        sums = torch._int_mm(F.pad(rounded, (0, 0, 0, max(0, _LEAST_ROWS - len(x)))), self._weight)[: len(x)]
        return _added((sums * scale * self._scales).to(x.dtype), bias, residual)


class Int4Weight:
    """INT4 with one scale per group, and optionally an offset, both rounded to bfloat16."""

    def __init__(self, matrix: QuantizedMatrix, dtype: torch.dtype) -> None:
        self._group = matrix.format.group
        swapped = matrix.codes << 4 | matrix.codes >> 4  # the operator expects even columns in the upper half of a byte
        self._weight = torch.ops.aten._convert_weight_to_int4pack(swapped, _TILES)
        self._terms = int4_terms(matrix).to(dtype)

    def linear(self, x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        """Return x @ weight.T + bias + residual, [T, out]."""
        out = torch.ops.aten._weight_int4pack_mm(x.contiguous(), self._weight, self._group, self._terms)
        return _added(out, bias, residual)


def int4_terms(matrix: QuantizedMatrix) -> Tensor:
    """Return the scales and offsets of scale * (code - 8) + offset, [groups, out, 2]."""
    zero = matrix.format.zero
    offsets = torch.zeros_like(matrix.scales) if matrix.offsets is None else matrix.offsets + zero * matrix.scales
    return torch.stack((matrix.scales, offsets), -1).transpose(0, 1).contiguous()


CudaProduct = KeptMatrix | Float8Weight | Int8Weight | Int4Weight


def choose_product(
    format: WeightFormat, shape: tuple[int, int], dtype: torch.dtype, capability: tuple[int, int]
) -> type[CudaProduct]:
    """Return the GEMM class for a matrix [out, in], an activation type and a compute capability."""
    outputs, inputs = shape
    by_output = format.group == inputs and not (outputs % _ALIGNMENT or inputs % _ALIGNMENT)
    if format.is_float:
        fits = format.bits == 8 and by_output and dtype == torch.bfloat16 and capability >= (8, 9)
        return Float8Weight if fits else KeptMatrix
    if format.int8_activations and format.bits == 8 and not format.has_offsets and by_output and capability >= (7, 5):
        return Int8Weight
    whole_tiles = format.group in _GROUPS and not (inputs % (16 * _TILES) or outputs % 8)
    if format.bits == 4 and whole_tiles and dtype == torch.bfloat16 and capability >= (8, 0):
        return Int4Weight
    return KeptMatrix


def _largest(x: Tensor) -> Tensor:
    """Return each row's largest absolute value, float32, [T, 1], never zero."""
    return x.abs().amax(-1, keepdim=True).float().clamp_(min=torch.finfo(torch.float32).tiny * 1024)


def _added(out: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    for term in (bias, residual):
        if term is not None:
            out = out.add_(term)
    return out
