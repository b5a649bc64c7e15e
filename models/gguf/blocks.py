"""Reads slices of GGUF's quantized rows."""

from __future__ import annotations

from dataclasses import replace

import torch

from ...kernels.quantized_matrix import QuantizedMatrix
from ..quantization.matrices import cut_groups
from ..quantization.schemes import cover
from .block_types import BlockType, Bytes, Floats


def read_blocks(type: BlockType, data: Bytes, block: int, columns: slice) -> QuantizedMatrix:
    """Return a column slice of quantized rows.

    Args:
        type: the block type.
        data: the blocks that cover the columns, [rows, blocks, bytes].
        block: columns per block.
        columns: slice with even start and stop.
    """
    format, (codes, scales, offsets) = type.format, type.unpack(data.reshape(-1, data.shape[2]))
    own, per_byte = cover(columns, block)[1], 8 // format.bits
    kept = torch.from_numpy(codes).view(len(data), -1)[:, own.start // per_byte : own.stop // per_byte]
    touched, _ = cover(own, format.group)

    def cut(values: Floats) -> tuple[torch.Tensor, int]:
        return cut_groups(torch.from_numpy(values).view(len(data), -1)[:, touched], format.group, columns)

    cut_scales, group = cut(scales)
    return QuantizedMatrix(replace(format, group=group), kept, cut_scales, None if offsets is None else cut(offsets)[0])
