"""A weight matrix in numbers of 8 or 4 bits, with a scale for each group of a row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .weight_format import WeightFormat

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # OCP's microscaling formats, version 1.0
E2M1 = (*_MAGNITUDES, *(-x for x in _MAGNITUDES))  # by code: the fourth bit is the sign
CODEBOOKS = {  # integers of 8 bits
    "iq4_nl": (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),  # llama.cpp's
}


def whole_numbers(format: WeightFormat) -> tuple[tuple[int, ...], float] | None:
    """Return the integers that codes stand for, and what these are multiplied by; None: codes are numbers."""
    if format.codebook:
        return CODEBOOKS[format.codebook], 1.0
    return (tuple(int(2 * number) for number in E2M1), 0.5) if format.has_table else None


@dataclass(slots=True)
class QuantizedMatrix:
    """A matrix [out, in]: each number is scale * (code - zero), or scale * code + offset where groups have offsets.

    Where codes are floats, each number is scale * code, and where they are indices of a codebook, scale * its entry.

    Attributes:
        format: how the integers are held.
        codes: [out, in * bits / 8], uint8. Of 4 bits, the lower half of a byte is the column with the even index.
        scales: [out, in / group], float32.
        offsets: [out, in / group], float32; None where the format has none.
    """

    format: WeightFormat
    codes: Tensor
    scales: Tensor
    offsets: Tensor | None = None

    @classmethod
    def empty(cls, out_size: int, in_size: int, format: WeightFormat, device: torch.device | str) -> QuantizedMatrix:
        """Make a matrix that is to be filled."""
        scales = torch.empty(out_size, in_size // format.group, device=device)
        return cls(
            format,
            torch.empty(out_size, in_size * format.bits // 8, dtype=torch.uint8, device=device),
            scales,
            torch.empty_like(scales) if format.has_offsets else None,
        )

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return len(self.codes), self.codes.shape[1] * 8 // self.format.bits

    def unpacked(self) -> Tensor:
        """Return the codes, one a byte, [out, in]."""
        if self.format.bits == 8:
            return self.codes
        return torch.stack((self.codes & 15, self.codes >> 4), dim=-1).flatten(1)

    def dequantized(self) -> Tensor:
        """Return the numbers, float32, [out, in]."""
        return dequantize(self.format, self.unpacked(), self.scales, self.offsets)


def dequantize(format: WeightFormat, codes: Tensor, scales: Tensor, offsets: Tensor | None) -> Tensor:
    """Return the numbers, float32, of codes [N, in], one a byte, with their scales and offsets [N, in / group]."""
    if format.is_float and format.bits == 8:
        numbers = codes.view(torch.float8_e4m3fn).float()
    elif format.is_float or format.codebook:
        table = E2M1 if format.is_float else CODEBOOKS[format.codebook]
        numbers = torch.tensor(table, dtype=torch.float32, device=codes.device)[codes.int()]
    else:
        numbers = codes.float() - (format.zero if offsets is None else 0)
    groups: Tensor = numbers.unflatten(1, (-1, format.group)) * scales[..., None]
    if offsets is not None:
        groups += offsets[..., None]
    return groups.flatten(1)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Return codes [out, in], one a byte, as `QuantizedMatrix` holds them."""
    return codes if bits == 8 else codes[:, ::2] | codes[:, 1::2] << 4
