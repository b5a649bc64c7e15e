"""CUDA's products: those that torch has on a CPU too are compared there, the others by their shapes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from gapless.kernels.cuda_products import (
    CudaProduct,
    Float8Weight,
    Int4Weight,
    Int8Weight,
    KeptMatrix,
    choose_product,
    int4_terms,
)
from gapless.kernels.quantized_matrix import QuantizedMatrix, dequantize
from gapless.kernels.weight_format import WeightFormat

HOPPER, AMPERE, TURING = (9, 0), (8, 0), (7, 5)
BF16 = torch.bfloat16


def random_matrix(outputs: int, inputs: int, format: WeightFormat) -> QuantizedMatrix:
    matrix = QuantizedMatrix.empty(outputs, inputs, format, "cpu")
    matrix.codes.random_(120)  # of E4M3, numbers without sign, none of them NaN
    matrix.scales.uniform_(0.5, 1.0)
    if matrix.offsets is not None:
        matrix.offsets.uniform_(-8.0, 0.0)
    return matrix


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize(
    ("kind", "format", "error"),
    [
        (KeptMatrix, WeightFormat(4, 16, has_offsets=True), 2.0**-8),
        (KeptMatrix, WeightFormat(8, 128, is_float=True), 2.0**-8),
        (Float8Weight, WeightFormat(8, 256, is_float=True), 2.0**-3),  # of activations, three bits after the point
        (Int8Weight, WeightFormat(8, 256, int8_activations=True), 2.0**-6),
    ],
)
def test_it_is_the_product_of_its_numbers(
    rows: int, kind: type[CudaProduct], format: WeightFormat, error: float
) -> None:
    torch.manual_seed(0)
    matrix = random_matrix(48, 256, format)
    x, bias, residual = torch.randn(rows, 256).to(BF16), torch.randn(48).to(BF16), torch.randn(rows, 48).to(BF16)
    weight = matrix.dequantized().double()
    exact = F.linear(x.double(), weight, bias.double()) + residual.double()
    size = F.linear(x.double().square(), weight.square()).sqrt() * 3
    found = kind(matrix, BF16).linear(x, bias, residual)
    assert found.dtype == BF16
    assert ((found.double() - exact).abs() <= error * (size + exact.abs())).all()
    none = kind(matrix, BF16).linear(torch.zeros(rows, 256).to(BF16))
    assert torch.equal(none, torch.zeros_like(none)), "a row of zeros has no scale"


def test_rows_of_a_kept_matrix() -> None:
    matrix, ids = random_matrix(48, 64, WeightFormat(4, 16, has_offsets=True)), torch.tensor([47, 0, 5])
    assert torch.equal(KeptMatrix(matrix, BF16).rows(ids), matrix.dequantized()[ids].to(BF16))


@pytest.mark.parametrize("has_offsets", [False, True])
def test_four_bits_by_their_shapes(has_offsets: bool) -> None:
    format = WeightFormat(4, 32, has_offsets)
    matrix = random_matrix(48, 128, format)
    terms = int4_terms(matrix)
    for group in (0, 3):
        codes = matrix.unpacked()[:, 32 * group : 32 * group + 32].float()
        numbers = terms[group, :, :1] * (codes - 8) + terms[group, :, 1:]
        offsets = None if matrix.offsets is None else matrix.offsets[:, [group]]
        expected = dequantize(format, codes.to(torch.uint8), matrix.scales[:, [group]], offsets)
        torch.testing.assert_close(numbers, expected, atol=1e-5, rtol=1e-5)
    with FakeTensorMode():
        product = Int4Weight(QuantizedMatrix.empty(48, 128, format, "cpu"), BF16)
        assert product.linear(torch.empty(5, 128, dtype=BF16), residual=torch.empty(5, 48, dtype=BF16)).shape == (5, 48)


@pytest.mark.parametrize(
    ("format", "shape", "dtype", "capability", "kind"),
    [
        (WeightFormat(8, 256, is_float=True), (64, 256), BF16, HOPPER, Float8Weight),
        (WeightFormat(8, 256, is_float=True), (64, 256), BF16, AMPERE, KeptMatrix),
        (WeightFormat(8, 256, is_float=True), (64, 256), torch.float32, HOPPER, KeptMatrix),
        (WeightFormat(8, 128, is_float=True), (64, 256), BF16, HOPPER, KeptMatrix),
        (WeightFormat(4, 32, is_float=True), (64, 256), BF16, HOPPER, KeptMatrix),
        (WeightFormat(8, 256, int8_activations=True), (64, 256), torch.float32, TURING, Int8Weight),
        (WeightFormat(8, 256, int8_activations=True), (60, 256), BF16, HOPPER, KeptMatrix),
        (WeightFormat(8, 256), (64, 256), BF16, HOPPER, KeptMatrix),
        (WeightFormat(4, 128), (64, 256), BF16, AMPERE, Int4Weight),
        (WeightFormat(4, 128), (64, 256), BF16, TURING, KeptMatrix),
        (WeightFormat(4, 16), (64, 256), BF16, AMPERE, KeptMatrix),
    ],
)
def test_the_device_has_the_chosen_product(
    format: WeightFormat,
    shape: tuple[int, int],
    dtype: torch.dtype,
    capability: tuple[int, int],
    kind: type[CudaProduct],
) -> None:
    assert choose_product(format, shape, dtype, capability) is kind
