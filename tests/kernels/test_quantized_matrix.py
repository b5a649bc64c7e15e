"""A quantized matrix's numbers."""

from __future__ import annotations

import pytest
import torch

from gapless.kernels.quantized_matrix import QuantizedMatrix, pack_codes
from gapless.kernels.weight_format import WeightFormat


def test_integers_have_a_zero_or_an_offset() -> None:
    codes = torch.tensor([[0, 3, 15, 8]], dtype=torch.uint8)
    scales, offsets = torch.tensor([[0.5, 2.0]]), torch.tensor([[1.0, -3.0]])
    matrix = QuantizedMatrix(WeightFormat(4, 2), pack_codes(codes, 4), scales)
    assert matrix.shape == (1, 4)
    assert torch.equal(matrix.unpacked(), codes)
    assert matrix.dequantized().tolist() == [[-4.0, -2.5, 14.0, 0.0]]
    matrix = QuantizedMatrix(WeightFormat(8, 2, has_offsets=True), codes, scales, offsets)
    assert matrix.dequantized().tolist() == [[1.0, 2.5, 27.0, 13.0]]


@pytest.mark.parametrize(("bits", "numbers"), [(8, [448.0, -0.25, 0.0, 3.5]), (4, [6.0, -0.5, 0.0, 3.0])])
def test_floats_are_themselves(bits: int, numbers: list[float]) -> None:
    codes = torch.tensor(numbers).to(torch.float8_e4m3fn).view(torch.uint8)
    if bits == 4:
        codes = torch.tensor([7, 9, 0, 5], dtype=torch.uint8)
    matrix = QuantizedMatrix(WeightFormat(bits, 4, is_float=True), pack_codes(codes[None], bits), torch.tensor([[2.0]]))
    assert matrix.dequantized().tolist() == [[2 * number for number in numbers]]
