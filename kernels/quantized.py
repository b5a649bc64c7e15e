"""Quantized GEMMs: weights stay in 8 or 4 bits if this device has a GEMM for them.

On a CPU the GEMM is our own (`quantized.cpp`). GEMMs of few rows are memory-bound and read a half or a quarter of the
bytes. If the processor multiplies bfloat16, GEMMs of many rows dequantize each weight block once, into the L1 cache.
Otherwise activations are quantized to 16-bit integers with one scale per group of inputs, which doubles the
multiplications per instruction.
"""

from __future__ import annotations

from ctypes import CDLL, Structure, c_int64, c_void_p
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from . import huge_pages
from .cpp_library import ELEMENTS, CppFile, addresses, find
from .cpp_product import ARGUMENTS, CppProduct
from .cuda_products import KeptMatrix, choose_product
from .packed import pack
from .quantized_matrix import QuantizedMatrix, whole_numbers

QUANTIZED = CppFile("quantized", linear=ARGUMENTS, rows="pppii", is_fixed_point=":i")
_OUTPUTS = 32  # per block
_INPUTS = 64  # a block's inputs are padded to a multiple of it
_WORD = 32  # bits
_HALF_ERROR = 2.0**-11  # relative rounding error of scales and offsets: less than of bfloat16 activations
_ZERO = 128  # in a table of bytes
_LEAST_TILED = 4  # rows to use AMX for: fewer are as fast without


class Product(Protocol):
    """A weight [out, in] in the layout of a device's GEMM."""

    def linear(self, x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        """Return x @ weight.T + bias + residual, [T, out]."""
        ...


class TableProduct(Product, Protocol):
    """A weight whose rows can be read too, for embeddings."""

    def rows(self, ids: Tensor) -> Tensor:
        """Return the weight's rows with these ids, [T, in]."""
        ...


class DequantizedWeight:
    """A weight that was dequantized on load."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def linear(self, x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        """Return x @ weight.T + bias + residual, [T, out]."""
        out = F.linear(x, self._weight, bias)
        return out if residual is None else out.add_(residual)

    def rows(self, ids: Tensor) -> Tensor:
        """Return the weight's rows with these ids, [T, in]."""
        return F.embedding(ids, self._weight)


class _Matrix(Structure):
    """`Matrix` of `quantized.cpp`."""

    _fields_ = (
        *((name, c_void_p) for name in ("codes", "scales", "offsets", "table")),
        *((name, c_int64) for name in ("outputs", "words", "groups", "group_words", "bits", "halves", "zero")),
        *((name, c_int64) for name in ("inputs", "rounds", "least_tiled")),
    )


class QuantizedWeight(CppProduct):
    """A quantized weight on a CPU, in the layout of the GEMM with activations of `dtype`.

    Its groups are whole words, since `common_format` makes only groups of a multiple of 16 inputs.
    """

    def __init__(self, matrix: QuantizedMatrix, dtype: torch.dtype, library: CDLL) -> None:
        format = matrix.format
        self._dtype = dtype
        out_size, in_size = matrix.shape
        in_word = _WORD // format.bits
        groups, words = in_size // format.group, format.group // in_word
        assert words * in_word == format.group, format
        assert format.bits == 8 or not format.int8_activations, format
        rows = _padded(matrix.codes, -matrix.codes.shape[1] % (_INPUTS * format.bits // 8))
        self._codes = huge_pages.copy(_blocks(rows.view(torch.int32)))
        numbers, unit = whole_numbers(format) or (None, 1.0)
        self._table = None if numbers is None else torch.tensor([_ZERO + each for each in numbers], dtype=torch.uint8)
        # With 8-bit values and offsets, a weight is a small difference of large terms: keep scales and offsets exact.
        is_exact = dtype == torch.float32 and not (format.half_scales and library.is_fixed_point())
        error = 0.0 if is_exact or (format.bits == 8 and format.has_offsets) else _HALF_ERROR
        scales, offsets = matrix.scales * unit, matrix.offsets
        halves = all(_are_halves(of, error) for of in (scales, offsets) if of is not None)
        kind = torch.float16 if halves else torch.float32
        self._scales = huge_pages.copy(_blocks(scales.to(kind)))
        self._offsets = None if offsets is None else huge_pages.copy(_blocks(offsets.to(kind)))
        zero = _ZERO if numbers else format.zero
        sizes = (out_size, self._codes.shape[1], groups, words, format.bits, halves, zero)
        tensors = addresses(self._codes, self._scales, self._offsets, self._table)
        self._rows = library.rows
        super().__init__(
            library.linear, matrix.shape, _Matrix(*tensors, *sizes, in_size, format.int8_activations, _LEAST_TILED)
        )

    def rows(self, ids: Tensor) -> Tensor:
        """Return the weight's rows with these ids, [T, in]."""
        ids, out = ids.contiguous(), torch.empty(len(ids), self.in_size, dtype=self._dtype)
        self._rows(self.weight, *addresses(ids, out), len(ids), self.in_size)
        return out


def _blocks(rows: Tensor) -> Tensor:
    """Rearrange [out, columns] as [blocks, columns, 32], padded with zeros."""
    blocks: Tensor = _padded(rows, 0, -len(rows) % _OUTPUTS).unflatten(0, (-1, _OUTPUTS))
    return blocks.transpose(1, 2)


def _padded(rows: Tensor, columns: int, more_rows: int = 0) -> Tensor:
    """Append `columns` zeros to each row, and `more_rows` rows of zeros. Returns the input itself if both are 0."""
    return F.pad(rows, (0, columns, 0, more_rows)) if columns or more_rows else rows


def _are_halves(numbers: Tensor, error: float) -> bool:
    """Return whether half precision represents all values within a relative error."""
    return bool(((numbers.half().float() - numbers).abs() <= error * numbers.abs()).all())


def make_product(matrix: QuantizedMatrix, dtype: torch.dtype) -> Product:
    """Pack a linear layer's matrix for GEMMs with activations of `dtype` on the matrix's device."""
    if matrix.codes.device.type == "cuda":
        capability = torch.cuda.get_device_capability(matrix.codes.device)
        return choose_product(matrix.format, matrix.shape, dtype, capability)(matrix, dtype)
    own = _make_own(matrix, dtype)
    if own is not None:
        return own
    weight = matrix.dequantized().to(dtype)
    return pack(weight) or DequantizedWeight(weight)


def make_table(matrix: QuantizedMatrix, dtype: torch.dtype) -> TableProduct:
    """Pack an embedding's matrix, which may be tied to the LM head."""
    if matrix.codes.device.type == "cuda":
        return KeptMatrix(matrix, dtype)
    return _make_own(matrix, dtype) or DequantizedWeight(matrix.dequantized().to(dtype))


def _make_own(matrix: QuantizedMatrix, dtype: torch.dtype) -> QuantizedWeight | None:
    format = matrix.format
    if dtype not in ELEMENTS or (format.is_float and format.bits != 4):
        return None
    library = find(QUANTIZED, dtype)
    if library is None or (format.has_table and not library.is_fixed_point()):
        return None
    return QuantizedWeight(matrix, dtype, library)
