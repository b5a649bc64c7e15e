"""A weight matrix quantized to 8 or 4 bits, with one scale per group of a row."""

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
    """Return the lookup table of a format's codes, in integers, and its multiplier; None: codes are plain values."""
    if format.codebook:
        return CODEBOOKS[format.codebook], 1.0
    return (tuple(int(2 * number) for number in E2M1), 0.5) if format.has_table else None


@dataclass(slots=True)
class QuantizedMatrix:
    """A quantized matrix [out, in]. A weight is scale * (code - zero), or scale * code + offset if groups have offsets.

    For float formats a weight is scale * code, for codebook formats scale * codebook[code].

    Attributes:
        format: bit width, group size and kind of the codes.
        codes: quantized values, [out, in * bits / 8], uint8. With 4 bits, the even column is the lower half of a byte.
        scales: [out, in / group], float32.
        offsets: [out, in / group], float32; None if the format has none.
    """

    format: WeightFormat
    codes: Tensor
    scales: Tensor
    offsets: Tensor | None = None

    @classmethod
    def empty(cls, out_size: int, in_size: int, format: WeightFormat, device: torch.device | str) -> QuantizedMatrix:
        """Make an uninitialized matrix."""
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
        """Return the codes, one per byte, [out, in]."""
        if self.format.bits == 8:
            return self.codes
        return torch.stack((self.codes & 15, self.codes >> 4), dim=-1).flatten(1)

    def dequantized(self) -> Tensor:
        """Return the dequantized weights, float32, [out, in]."""
        return dequantize(self.format, self.unpacked(), self.scales, self.offsets)


def dequantize(format: WeightFormat, codes: Tensor, scales: Tensor, offsets: Tensor | None) -> Tensor:
    """Dequantize codes [N, in], one per byte, with scales and offsets [N, in / group], to float32 [N, in]."""
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
    """Pack codes [out, in], one per byte, into the layout of `QuantizedMatrix.codes`."""
    return codes if bits == 8 else codes[:, ::2] | codes[:, 1::2] << 4
