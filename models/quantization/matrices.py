"""Slices and converts quantized matrices, without loss, and quantizes others."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...kernels.quantized_matrix import QuantizedMatrix, pack_codes, whole_numbers
from ...kernels.weight_format import WeightFormat

_E4M3_MAX = 448.0


def cut_groups(values: Tensor, group: int, columns: slice) -> tuple[Tensor, int]:
    """Return the scales or offsets of a column slice, and its group size.

    Args:
        values: [rows, groups], for the groups that the columns touch.
        group: group size of the whole matrix.
        columns: slice of the whole matrix. If it splits groups, smaller groups repeat the scale.
    """
    width = columns.stop - columns.start
    if values.shape[1] == 1:
        return values, width
    smaller = math.gcd(group, columns.start, width)
    if smaller == group:
        return values, group
    first = columns.start % group // smaller
    return values.repeat_interleave(group // smaller, dim=1)[:, first : first + width // smaller], smaller


def converted(matrix: QuantizedMatrix, format: WeightFormat) -> QuantizedMatrix:
    """Return the same values in a format with at least as many bits and groups of at most the same size.

    `int8_activations` does not affect the values. A format without offsets takes only matrices without offsets. Floats
    of 4 bits are multiples of one half, and codebook entries are integers, so that both fit 8-bit integers.
    """
    if (matrix.format.is_float and not format.is_float) or (matrix.format.codebook and not format.codebook):
        matrix = _whole_numbers(matrix)
    own, codes = matrix.format, matrix.codes
    assert own.is_float == format.is_float, (own, format)
    assert own.group % format.group == 0, (own, format)
    times = own.group // format.group
    scales = matrix.scales.repeat_interleave(times, dim=1) if times > 1 else matrix.scales
    offsets = matrix.offsets
    if offsets is not None and times > 1:
        offsets = offsets.repeat_interleave(times, dim=1)
    if own.bits < format.bits:
        codes = matrix.unpacked()
        if not format.has_offsets:
            codes = codes + (format.zero - own.zero)
    if format.has_offsets and offsets is None:
        offsets = scales * -own.zero
    return QuantizedMatrix(format, codes, scales, offsets)


def _whole_numbers(matrix: QuantizedMatrix) -> QuantizedMatrix:
    """Convert 4-bit floats or codebook indices to 8-bit integers."""
    own, table = WeightFormat(8, matrix.format.group), whole_numbers(matrix.format)
    assert table is not None, matrix.format
    whole = torch.tensor([number + own.zero for number in table[0]], dtype=torch.uint8)
    return QuantizedMatrix(own, whole[matrix.unpacked().int()], matrix.scales * table[1])


def with_groups_of_one(codes: Tensor, bits: int, scales: Tensor, zeros: Tensor) -> QuantizedMatrix:
    """Return a matrix with group size 1: scales and zeros are [rows, columns]."""
    format = WeightFormat(bits, 1, has_offsets=True)
    return QuantizedMatrix(format, codes, scales, -scales * zeros)


def nibbles(data: Tensor) -> Tensor:
    """Split each byte of the last dimension into its nibbles, low first."""
    return torch.stack((data & 15, data >> 4), dim=-1).flatten(-2)


def round_to(numbers: Tensor, format: WeightFormat) -> QuantizedMatrix:
    """Quantize a matrix [out, in] with round-to-nearest and scales that cover each group's range.

    Integers with offsets span a group's minimum to maximum; other formats are symmetric about 0.
    """
    groups = numbers.float().unflatten(1, (-1, format.group))
    most, offsets = (1 << format.bits) - 1, None
    if format.has_offsets:
        offsets = groups.amin(-1)
        scales = (groups.amax(-1) - offsets) / most
        codes = (groups - offsets[..., None]) / _divisor(scales)
    else:
        scales = groups.abs().amax(-1) / (_E4M3_MAX if format.is_float else format.zero - 1)
        codes = groups / _divisor(scales)
        if format.is_float:
            return QuantizedMatrix(format, codes.flatten(1).to(torch.float8_e4m3fn).view(torch.uint8), scales)
        codes += format.zero
    whole = codes.round_().clamp_(0, most).to(torch.uint8).flatten(1)
    return QuantizedMatrix(format, pack_codes(whole, format.bits), scales, offsets)


def _divisor(scales: Tensor) -> Tensor:
    return scales.masked_fill(scales == 0, 1.0)[..., None]
