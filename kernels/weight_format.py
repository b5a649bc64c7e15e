"""The storage format of a quantized matrix: bit width, group size, kind of codes. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

_SCALE_BITS = 32


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """The storage format of a quantized matrix.

    Attributes:
        bits: per quantized value, 4 or 8; or 16 for floats without a scale.
        group: number of adjacent inputs of a row that share a scale, a divisor of the row's inputs; 0: no scales.
        has_offsets: whether each group has an offset too. Without one, the code of zero is half the range.
        int8_activations: whether the GEMM quantizes activations too, to 8 bits with one scale per token (W8A8).
        is_float: whether codes are floats, not integers: 8-bit E4M3 (FP8, `torch.float8_e4m3fn`), 4-bit E2M1 (MXFP4),
            or bfloat16. They have no offsets. On CUDA the FP8 GEMM quantizes activations to E4M3.
        is_half: whether 16-bit floats are float16.
        codebook: the table of `CODEBOOKS` that 4-bit codes index; empty: no table. Codebook formats have no offsets.
        half_scales: whether fixed-point GEMMs may round scales and offsets to half precision, by up to 2^-12. Set for
            GGUF's K types: their scales are a half times a small integer, which half precision cannot represent.
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
        """Whether 4-bit codes index a table: of E2M1 floats, or a codebook."""
        return bool(self.codebook) or (self.is_float and self.bits == 4)

    @property
    def zero(self) -> int:
        """The code of zero if groups have no offset."""
        return 1 << (self.bits - 1)

    @property
    def bytes_per_element(self) -> float:
        """Bytes per weight, including its share of the group's scale and offset."""
        if self.bits == 16:
            return 2.0
        return (self.bits + _SCALE_BITS * (2 if self.has_offsets else 1) / self.group) / 8


# 16-bit formats, by their names in safetensors and GGUF files.
SHORT = {"BF16": WeightFormat(16, 0, is_float=True), "F16": WeightFormat(16, 0, is_float=True, is_half=True)}
