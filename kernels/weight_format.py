"""How a quantized matrix is held: bits of a code, columns of a group. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

_SCALE_BITS = 32


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How a quantized matrix is held.

    Attributes:
        bits: of a code, 4 or 8; or 16, of floats that have no scale.
        group: neighbouring inputs of a row that share a scale, a divisor of the row's inputs; 0: there is no scale.
        has_offsets: whether each group has an offset too. Without one, the code of zero is half the range.
        int8_activations: whether the product rounds activations too, to 8 bits with a scale for each token (W8A8).
        is_float: whether codes are floats, and not integers: E4M3 (FP8, `torch.float8_e4m3fn`) of 8 bits, E2M1 (MXFP4)
            of 4, or bfloat16. They have no offsets. On CUDA the product of those of 8 bits rounds activations to E4M3.
        is_half: whether floats of 16 bits are float16.
        codebook: the table of `CODEBOOKS` that codes of 4 bits are indices of; empty: they are numbers. It has no
            offsets.
        half_scales: whether fixed-point GEMMs may hold scales and offsets in half precision, rounded by up to 2^-12.
            GGUF's K types set it: their scales are a half times a small integer, which half precision cannot hold.
    """

    bits: int
    group: int
    has_offsets: bool = False
    int8_activations: bool = False
    is_float: bool = False
    is_half: bool = False
    codebook: str = ""
    half_scales: bool = False

    @property
    def has_table(self) -> bool:
        """Whether codes of 4 bits stand for the numbers of a table: floats, or a codebook's."""
        return bool(self.codebook) or (self.is_float and self.bits == 4)

    @property
    def zero(self) -> int:
        """The code of zero where groups have no offset."""
        return 1 << (self.bits - 1)

    @property
    def bytes_per_element(self) -> float:
        """Bytes of a number with its share of its group's scale and offset."""
        if self.bits == 16:
            return 2.0
        return (self.bits + _SCALE_BITS * (2 if self.has_offsets else 1) / self.group) / 8


# Numbers of 16 bits, by the names that files have for them.
SHORT = {"BF16": WeightFormat(16, 0, is_float=True), "F16": WeightFormat(16, 0, is_float=True, is_half=True)}
