"""Products with quantized weights, which stay in 8 or 4 bits where this device has a product for them.

On a CPU that is our own (`quantized.cpp`). Few rows wait for memory, of which they read a half or a quarter. Where the
processor multiplies bfloat16, weights become numbers once for many rows, in a cache. Elsewhere activations become
integers of 16 bits, with a scale for each group of inputs: one instruction multiplies twice as many as of floats.
"""

from __future__ import annotations

from ctypes import CDLL, Structure, c_int64, c_void_p
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from . import huge_pages
from .cpp_library import ELEMENTS, addresses, find
from .cpp_product import ARGUMENTS, CppProduct
from .cuda_products import KeptMatrix, choose_product
from .packed import pack
from .quantized_matrix import QuantizedMatrix, pack_codes, whole_numbers

_OUTPUTS = 32  # of a block
_INPUTS = 64  # a block's are padded to a multiple of it
_WORD = 32  # bits
_HALF_ERROR = 2.0**-11  # of scales and offsets, relative: less than that of activations in bfloat16
_ZERO = 128  # in a table, whose numbers are bytes
_LEAST_TILED = 4  # rows, where the processor has tiles: fewer are as fast without


class Product(Protocol):
    """A weight [out, in], laid out for the products of a device."""

    def linear(self, x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        """Return x @ weight.T + bias + residual, [T, out]."""
        ...


class TableProduct(Product, Protocol):
    """One whose rows can be read too: an embedding's."""

    def rows(self, ids: Tensor) -> Tensor:
        """Return the weight's rows, [T, in]."""
        ...


class DequantizedWeight:
    """A weight that is quantized in its file only."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def linear(self, x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        """Return x @ weight.T + bias + residual, [T, out]."""
        out = F.linear(x, self._weight, bias)
        return out if residual is None else out.add_(residual)

    def rows(self, ids: Tensor) -> Tensor:
        """Return the weight's rows, [T, in]."""
        return F.embedding(ids, self._weight)


class _Matrix(Structure):
    """`Matrix` of `quantized.cpp`."""

    _fields_ = (
        *((name, c_void_p) for name in ("codes", "scales", "offsets", "table")),
        *((name, c_int64) for name in ("outputs", "words", "groups", "group_words", "bits", "halves", "zero")),
        *((name, c_int64) for name in ("inputs", "rounds", "least_tiled")),
    )


class QuantizedWeight(CppProduct):
    """A weight of integers on a CPU, laid out for products with activations of `dtype`.

    Groups of its inputs may be padded, and `inputs` pads rows.
    """

    def __init__(self, matrix: QuantizedMatrix, dtype: torch.dtype, library: CDLL) -> None:
        format = matrix.format
        self._dtype, self._format = dtype, format
        out_size, in_size = matrix.shape
        # Rounded activations are multiplied with codes of 8 bits, whose zero stays that of 4.
        self._bits = 8 if format.int8_activations else format.bits
        in_word = _WORD // self._bits
        groups, words = in_size // format.group, -(-format.group // in_word)
        self._group = words * in_word  # with its padding, of zeros in x
        self.is_padded = self._group != format.group
        self._codes = huge_pages.copy(_blocks(self._padded_codes(matrix)))
        numbers, unit = whole_numbers(format) or (None, 1.0)
        self._table = None if numbers is None else torch.tensor([_ZERO + each for each in numbers], dtype=torch.uint8)
        # Numbers are the small difference of a large code and offset, where both have many bits.
        is_exact = dtype == torch.float32 and not (format.half_scales and library.is_fixed_point())
        error = 0.0 if is_exact or (format.bits == 8 and format.has_offsets) else _HALF_ERROR
        scales, offsets = matrix.scales * unit, matrix.offsets
        halves = all(_are_halves(of, error) for of in (scales, offsets) if of is not None)
        kind = torch.float16 if halves else torch.float32
        self._scales = huge_pages.copy(_blocks(scales.to(kind)))
        self._offsets = None if offsets is None else huge_pages.copy(_blocks(offsets.to(kind)))
        zero = _ZERO if numbers else format.zero
        sizes = (out_size, self._codes.shape[1], groups, words, self._bits, halves, zero)
        rows = (groups * self._group, format.int8_activations, _LEAST_TILED)
        tensors = addresses(self._codes, self._scales, self._offsets, self._table)
        self._rows = library.rows
        super().__init__(library.linear, matrix.shape, _Matrix(*tensors, *sizes, *rows))

    def _padded_codes(self, matrix: QuantizedMatrix) -> Tensor:
        """Return words of codes, int32, [out, words], where each group and all inputs are padded."""
        codes = matrix.codes
        if self._bits != matrix.format.bits or self._group != matrix.format.group:
            padding = (0, self._group - matrix.format.group)
            codes = F.pad(matrix.unpacked().unflatten(1, (-1, matrix.format.group)), padding).flatten(1)
            codes = pack_codes(codes, self._bits)
        return _padded(codes, -codes.shape[1] % (_INPUTS * self._bits // 8)).view(torch.int32)

    def inputs(self, x: Tensor) -> Tensor:
        """Return rows as the codes are laid out, with zeros where a group is padded."""
        if self.is_padded:
            padding = (0, self._group - self._format.group)
            x = F.pad(x.unflatten(1, (-1, self._format.group)), padding).flatten(1)
        return x.contiguous()

    def rows(self, ids: Tensor) -> Tensor:
        """Return the weight's rows, [T, in]."""
        ids, out = ids.contiguous(), torch.empty(len(ids), self.in_size, dtype=self._dtype)
        self._rows(self.weight, *addresses(ids, out), len(ids), self.in_size)
        return out


def _blocks(rows: Tensor) -> Tensor:
    """Return [blocks, columns, 32] of [out, columns], padded with zeros."""
    blocks: Tensor = _padded(rows, 0, -len(rows) % _OUTPUTS).unflatten(0, (-1, _OUTPUTS))
    return blocks.transpose(1, 2)


def _padded(rows: Tensor, columns: int, more_rows: int = 0) -> Tensor:
    """Return rows with zeros after each and after the last; themselves, not a copy, where none are asked for."""
    return F.pad(rows, (0, columns, 0, more_rows)) if columns or more_rows else rows


def _are_halves(numbers: Tensor, error: float) -> bool:
    """Return whether numbers are of half precision, but for a relative error."""
    return bool(((numbers.half().float() - numbers).abs() <= error * numbers.abs()).all())


def _library(dtype: torch.dtype) -> CDLL | None:
    """Load the products; None where they cannot be compiled."""
    return find("quantized", dtype, linear=ARGUMENTS, rows="pppii", is_fixed_point=":i")


def make_product(matrix: QuantizedMatrix, dtype: torch.dtype) -> Product:
    """Lay a linear layer's matrix out for activations of a type on the matrix's device."""
    if matrix.codes.device.type == "cuda":
        capability = torch.cuda.get_device_capability(matrix.codes.device)
        return choose_product(matrix.format, matrix.shape, dtype, capability)(matrix, dtype)
    own = _make_own(matrix, dtype)
    if own is not None:
        return own
    weight = matrix.dequantized().to(dtype)
    return pack(weight) or DequantizedWeight(weight)


def make_table(matrix: QuantizedMatrix, dtype: torch.dtype) -> TableProduct:
    """Lay an embedding's matrix out, which may be an LM head's too."""
    if matrix.codes.device.type == "cuda":
        return KeptMatrix(matrix, dtype)
    return _make_own(matrix, dtype) or DequantizedWeight(matrix.dequantized().to(dtype))


def _make_own(matrix: QuantizedMatrix, dtype: torch.dtype) -> QuantizedWeight | None:
    format = matrix.format
    if dtype not in ELEMENTS or (format.is_float and format.bits != 4):
        return None
    library = _library(dtype)
    if library is None or (format.has_table and not library.is_fixed_point()):
        return None
    return QuantizedWeight(matrix, dtype, library)
