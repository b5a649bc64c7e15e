"""The blocks of GGUF's quantized types as codes, scales and offsets.

Source of the layouts: `ggml-quants.c` and `ggml-common.h` of the ggml project. The numbers are those that
`gguf.dequantize` makes of the blocks, bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from ...kernels.quantized_matrix import QuantizedMatrix
from ...kernels.weight_format import WeightFormat
from ..quantization.matrices import cut_groups
from ..quantization.schemes import cover

Bytes = npt.NDArray[np.uint8]  # of blocks, [blocks, bytes], or of a part of each
Floats = npt.NDArray[np.float32]
Parts = tuple[Bytes, Floats, Floats | None]  # codes as `QuantizedMatrix` has them, scales and offsets of a block


def read_blocks(kind: str, format: WeightFormat, data: Bytes, block: int, columns: slice) -> QuantizedMatrix:
    """Return a slice of columns of whole blocks.

    Args:
        kind: the name of a type.
        format: what its codes and groups are.
        data: the rows' blocks that the columns touch, [rows, blocks, bytes].
        block: columns of a block.
        columns: begin and end at even ones.
    """
    codes, scales, offsets = _READERS[kind](data.reshape(-1, data.shape[2]))
    own, per_byte = cover(columns, block)[1], 8 // format.bits
    kept = torch.from_numpy(codes).view(len(data), -1)[:, own.start // per_byte : own.stop // per_byte]
    touched, _ = cover(own, format.group)

    def cut(values: Floats) -> tuple[torch.Tensor, int]:
        return cut_groups(torch.from_numpy(values).view(len(data), -1)[:, touched], format.group, columns)

    cut_scales, group = cut(scales)
    return QuantizedMatrix(replace(format, group=group), kept, cut_scales, None if offsets is None else cut(offsets)[0])


def _half(data: Bytes) -> Floats:
    """Return numbers of 16 bits, [blocks, count]."""
    return np.ascontiguousarray(data).view(np.float16).astype(np.float32)


def _paired(low_then_high: Bytes) -> Bytes:
    """Return codes of 4 bits with neighbours in a byte, [blocks, bytes].

    Args:
        low_then_high: [blocks, runs, n]: a run has n codes in the lower halves, and then n in the upper ones.
    """
    even, odd = low_then_high[..., ::2], low_then_high[..., 1::2]
    low, high = (even & 15) | (odd << 4), (even >> 4) | (odd & 0xF0)
    return np.stack((low, high), axis=-2).reshape(len(low_then_high), -1)


def _spread(low_then_high: Bytes) -> Bytes:
    """Return such codes one a byte, [blocks, codes]."""
    return np.stack((low_then_high & 15, low_then_high >> 4), axis=-2).reshape(len(low_then_high), -1)


def _quarters(data: Bytes) -> Bytes:
    """Return codes of 2 bits, one a byte: of each run of up to 32 bytes the lowest bits of all, then the next."""
    runs = data.reshape(len(data), -1, 1, min(32, data.shape[1]))
    return (runs >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & np.uint8(3)).reshape(len(data), -1)


def _joined(codes: Bytes) -> Bytes:
    """Return codes of 4 bits, one a byte, with neighbours in a byte."""
    return codes[:, ::2] | codes[:, 1::2] << np.uint8(4)


def _q4_0(data: Bytes) -> Parts:
    return _paired(data[:, None, 2:]), _half(data[:, :2]), None


def _q4_1(data: Bytes) -> Parts:
    return _paired(data[:, None, 4:]), _half(data[:, :2]), _half(data[:, 2:4])


def _fifth_bits(data: Bytes) -> Bytes:
    """Return the bits of [blocks, 4] as 16 or nothing, [blocks, 32]."""
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


_READERS: dict[str, Callable[[Bytes], Parts]] = {
    "IQ4_NL": _q4_0,  # the same layout; the format says what a code stands for
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
