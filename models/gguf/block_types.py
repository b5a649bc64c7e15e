"""GGUF's quantized types: the format of each, and how its blocks unpack into values, scales and offsets.

Imports no torch. Sizes of blocks are those of the package `gguf`.

Source of the layouts: `ggml-quants.c` and `ggml-common.h` of the ggml project. Results match `gguf.dequantize` bit for
bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...kernels.weight_format import WeightFormat

Bytes = npt.NDArray[np.uint8]  # of blocks, [blocks, bytes], or of a part of each
Floats = npt.NDArray[np.float32]
Parts = tuple[Bytes, Floats, Floats | None]  # `QuantizedMatrix.codes`, and the blocks' scales and offsets


@dataclass(frozen=True, slots=True)
class BlockType:
    """A GGUF type.

    Attributes:
        format: in which its weights are held.
        unpack: returns the parts of blocks, [blocks, bytes].
    """

    format: WeightFormat
    unpack: Callable[[Bytes], Parts]


def _half(data: Bytes) -> Floats:
    """Return 16-bit floats as float32, [blocks, count]."""
    return np.ascontiguousarray(data).view(np.float16).astype(np.float32)


def _paired(low_then_high: Bytes) -> Bytes:
    """Return 4-bit values with neighbours in one byte, [blocks, bytes].

    Args:
        low_then_high: [blocks, runs, n]: each run has n values in the low nibbles, then n in the high nibbles.
    """
    even, odd = low_then_high[..., ::2], low_then_high[..., 1::2]
    low, high = (even & 15) | (odd << 4), (even >> 4) | (odd & 0xF0)
    return np.stack((low, high), axis=-2).reshape(len(low_then_high), -1)


def _spread(low_then_high: Bytes) -> Bytes:
    """Like `_paired`, but with one value per byte, [blocks, values]."""
    return np.stack((low_then_high & 15, low_then_high >> 4), axis=-2).reshape(len(low_then_high), -1)


def _quarters(data: Bytes) -> Bytes:
    """Return 2-bit values, one per byte: for each run of up to 32 bytes, all lowest bit pairs, then the next."""
    runs = data.reshape(len(data), -1, 1, min(32, data.shape[1]))
    return (runs >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & np.uint8(3)).reshape(len(data), -1)


def _joined(codes: Bytes) -> Bytes:
    """Pack 4-bit values, given one per byte, with neighbours in one byte."""
    return codes[:, ::2] | codes[:, 1::2] << np.uint8(4)


def _q4_0(data: Bytes) -> Parts:
    return _paired(data[:, None, 2:]), _half(data[:, :2]), None


def _q4_1(data: Bytes) -> Parts:
    return _paired(data[:, None, 4:]), _half(data[:, :2]), _half(data[:, 2:4])


def _fifth_bits(data: Bytes) -> Bytes:
    """Return the bits of [blocks, 4] as 16 or 0, [blocks, 32]."""
    return np.unpackbits(data, axis=1, bitorder="little") << np.uint8(4)


def _q5_0(data: Bytes) -> Parts:
    codes = _spread(data[:, None, 6:]) | _fifth_bits(data[:, 2:6])
    return codes + np.uint8(128 - 16), _half(data[:, :2]), None


def _q5_1(data: Bytes) -> Parts:
    codes = _spread(data[:, None, 8:]) | _fifth_bits(data[:, 4:8])
    return codes, _half(data[:, :2]), _half(data[:, 2:4])


def _q8_0(data: Bytes) -> Parts:
    return data[:, 2:] ^ np.uint8(128), _half(data[:, :2]), None


def _iq4_xs(data: Bytes) -> Parts:
    low, high = (
        _spread(data[:, None, 4:8].reshape(-1, 4, 1)).reshape(-1, 8),
        np.ascontiguousarray(data[:, 2:4]).view("<u2"),
    )
    scales = (low | (high >> np.arange(0, 16, 2, dtype=np.uint16) & 3) << 4).astype(np.float32) - 32
    return _paired(data[:, 8:].reshape(-1, 8, 16)), _half(data[:, :2]) * scales, None


def _mxfp4(data: Bytes) -> Parts:
    return _paired(data[:, None, 1:]), np.ldexp(np.float32(1), data[:, :1].astype(np.int32) - 127), None


def _q2_k(data: Bytes) -> Parts:
    scales, offsets = _half(data[:, 80:82]) * (data[:, :16] & 15), -(_half(data[:, 82:84]) * (data[:, :16] >> 4))
    return _joined(_quarters(data[:, 16:80])), scales, offsets


def _q3_k(data: Bytes) -> Parts:
    third = np.unpackbits(data[:, :32, None], axis=2, bitorder="little").swapaxes(1, 2).reshape(-1, 256)
    low, high = data[:, 96:104], data[:, 104:108]
    sixes = _spread(low[:, None]) | _quarters(high) << np.uint8(4)
    codes = _joined(_quarters(data[:, 32:96]) + 4 * third + np.uint8(4))
    return codes, _half(data[:, 108:]) * (sixes.astype(np.float32) - 32), None


def _scales_of_k(data: Bytes) -> tuple[Floats, Floats]:
    """Return the scales and offsets of a block's 8 groups, from its first 16 bytes."""
    whole, least = _half(data[:, :2]), _half(data[:, 2:4])
    low, middle, high = data[:, 4:8], data[:, 8:12], data[:, 12:16]
    scales = np.concatenate((low & 63, (high & 15) | (low >> 2 & 48)), axis=1)
    offsets = np.concatenate((middle & 63, (high >> 4) | (middle >> 2 & 48)), axis=1)
    return whole * scales, -(least * offsets)


def _q4_k(data: Bytes) -> Parts:
    return _paired(data[:, 16:].reshape(len(data), 4, 32)), *_scales_of_k(data)


def _q5_k(data: Bytes) -> Parts:
    shifts = np.arange(8, dtype=np.uint8)[:, None]
    fifth = (data[:, None, 16:48] >> shifts & np.uint8(1)) << np.uint8(4)
    codes = _spread(data[:, 48:].reshape(len(data), 4, 32)) | fifth.reshape(len(data), 256)
    return codes, *_scales_of_k(data)


def _q6_k(data: Bytes) -> Parts:
    codes = _spread(data[:, :128].reshape(-1, 2, 64)) | _quarters(data[:, 128:192]) << np.uint8(4)
    scales = np.ascontiguousarray(data[:, 192:208]).view(np.int8) * _half(data[:, 208:])
    return codes + np.uint8(128 - 32), scales.astype(np.float32), None


BLOCK_TYPES = {
    "Q4_0": BlockType(WeightFormat(4, 32), _q4_0),
    "Q4_1": BlockType(WeightFormat(4, 32, has_offsets=True), _q4_1),
    "Q5_0": BlockType(WeightFormat(8, 32), _q5_0),
    "Q5_1": BlockType(WeightFormat(8, 32, has_offsets=True), _q5_1),
    "Q8_0": BlockType(WeightFormat(8, 32), _q8_0),
    "Q2_K": BlockType(WeightFormat(4, 16, has_offsets=True, half_scales=True), _q2_k),
    "Q3_K": BlockType(WeightFormat(4, 16, half_scales=True), _q3_k),
    "Q4_K": BlockType(WeightFormat(4, 32, has_offsets=True, half_scales=True), _q4_k),
    "Q5_K": BlockType(WeightFormat(8, 32, has_offsets=True), _q5_k),
    "Q6_K": BlockType(WeightFormat(8, 16, half_scales=True), _q6_k),
    "IQ4_NL": BlockType(WeightFormat(4, 32, codebook="iq4_nl"), _q4_0),
    "IQ4_XS": BlockType(WeightFormat(4, 32, codebook="iq4_nl", half_scales=True), _iq4_xs),
    "MXFP4": BlockType(WeightFormat(4, 32, is_float=True), _mxfp4),
}
