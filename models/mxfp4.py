"""Numbers of 4 bits with a scale for each 32, in the MXFP4 format of the Open Compute Project, as gpt-oss has them."""

from __future__ import annotations

import torch

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the lower three bits; the fourth is the sign
_EXPONENT_BIAS = 127


def dequantized(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the numbers, bfloat16, [rows, 32 * groups], which holds them exactly.

    Args:
        blocks: uint8, [rows, groups, 16]; of a byte the lower half is the first number.
        scales: uint8, [rows, groups], exponents of 2.
    """
    values = torch.tensor([*_MAGNITUDES, *(-each for each in _MAGNITUDES)])
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(2).long()
    numbers = torch.ldexp(values[codes], scales[..., None].int() - _EXPONENT_BIAS)
    return numbers.flatten(1).to(torch.bfloat16)
