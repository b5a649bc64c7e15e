"""Products with quantized weights, beside those of the numbers that the weights stand for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.kernels.cpp_library import find
from gapless.kernels.quantized import QUANTIZED, QuantizedWeight, make_product, make_table
from gapless.kernels.quantized_matrix import QuantizedMatrix, WeightFormat, pack_codes
from tests.support.tiers import examples

DTYPES = [torch.float32, torch.bfloat16]
# Of bfloat16, outputs are rounded, and numbers where rows are many and each group has its own scale.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7}
pytestmark = pytest.mark.skipif(find(QUANTIZED, torch.float32) is None, reason="needs a C++ compiler")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def random_matrix(outputs: int, inputs: int, format: WeightFormat, seed: int = 0) -> QuantizedMatrix:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << format.bits, (outputs, inputs), generator=generator, dtype=torch.uint8)
    scales = torch.rand(outputs, inputs // format.group, generator=generator) + 0.5
    offsets = torch.rand(scales.shape, generator=generator) * -(1 << format.bits) if format.has_offsets else None
    return QuantizedMatrix(format, pack_codes(codes, format.bits), scales, offsets)


def is_fixed_point(dtype: torch.dtype) -> bool:
    """Return whether this level multiplies integers of 16 bits, to which activations are rounded by group."""
    library = find(QUANTIZED, dtype)
    return library is not None and bool(library.is_fixed_point())


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Round rows to 8 bits as compressed-tensors does: symmetric, with a scale a token."""
    most = x.abs().amax(-1, keepdim=True)
    return (x * (127.50003 / most)).nan_to_num().round().clamp(-128, 127) * (most / 127.5)


def check(product: Any, matrix: QuantizedMatrix, x: torch.Tensor, *terms: torch.Tensor | None) -> None:
    weight, given = matrix.dequantized().double(), x.float()
    if matrix.format.int8_activations:
        given = rounded(given)
    exact = F.linear(given.double(), weight)
    size = F.linear(given.double().square(), weight.square()).sqrt() * 2  # of a sum's terms, taken together
    for term in terms:
        if term is not None:
            exact += term.double()
            size = size + term.double().abs()
    allowed = TOLERANCES[x.dtype] * (size + exact.abs()) + 1e-6
    if is_fixed_point(x.dtype) and not matrix.format.int8_activations:
        most, sums = (of.unflatten(1, (-1, matrix.format.group)).abs() for of in (given.double(), weight))
        allowed += 2.0**-16 * F.linear(most.amax(-1), sums.sum(-1))
    error = (product.linear(x, *terms).double() - exact).abs()
    assert (error <= allowed).all(), (error / allowed).max()


@given(
    rows=st.one_of(st.integers(0, 20), st.sampled_from([32, 47, 64, 130, 257])),
    outputs=st.sampled_from([1, 31, 32, 64, 100, 160, 320]),
    group=st.sampled_from([16, 32, 48, 64, 128, 144]),
    groups=st.integers(1, 9),
    bits=st.sampled_from([4, 8]),
    has_offsets=st.booleans(),
    int8_activations=st.booleans(),
    with_bias=st.booleans(),
    with_residual=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
@settings(max_examples=examples(200), deadline=None)
def test_it_is_the_product_of_its_numbers(
    rows: int,
    outputs: int,
    group: int,
    groups: int,
    bits: int,
    has_offsets: bool,
    int8_activations: bool,
    with_bias: bool,
    with_residual: bool,
    dtype: torch.dtype,
) -> None:
    inputs, int8_activations = group * groups, int8_activations and bits == 8
    matrix = random_matrix(outputs, inputs, WeightFormat(bits, group, has_offsets, int8_activations))
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, inputs, generator=generator).to(dtype)
    bias = torch.randn(outputs, generator=generator).to(dtype) if with_bias else None
    residual = torch.randn(rows, outputs, generator=generator).to(dtype) if with_residual else None
    product = make_product(matrix, dtype)
    assert isinstance(product, QuantizedWeight)
    for least_tiled in (1, 1 << 30):
        product._held.least_tiled = least_tiled
        check(product, matrix, x, bias, residual)
    table = make_table(matrix, dtype)
    ids = torch.tensor([outputs - 1, 0])
    of_halves = 2.0**-11 * 16 if has_offsets and bits == 4 and dtype == torch.bfloat16 else 1e-5
    expected = matrix.dequantized()[ids].to(dtype)
    torch.testing.assert_close(table.rows(ids), expected, atol=of_halves, rtol=TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 17])
def test_threads_change_no_bit(rows: int, dtype: torch.dtype) -> None:
    """And rows that lie apart are read."""
    for format in (WeightFormat(4, 32, has_offsets=True), WeightFormat(8, 96, int8_activations=True)):
        product = make_product(random_matrix(224, 96, format), dtype)
        x, residual = torch.randn(2 * rows, 96).to(dtype)[::2], torch.randn(rows, 448).to(dtype)[:, ::2]
        torch.set_num_threads(1)
        alone = product.linear(x, None, residual)
        torch.set_num_threads(3)
        assert torch.equal(product.linear(x, None, residual), alone)
        assert torch.equal(product.linear(x.contiguous(), None, residual.contiguous()), alone)


@pytest.mark.parametrize("int8_activations", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_is_seen(dtype: torch.dtype, int8_activations: bool) -> None:
    matrix = random_matrix(64, 64, WeightFormat(8, 64, int8_activations=int8_activations))
    x = torch.randn(40, 64).to(dtype)
    x[3, 5], x[39, 0] = float("nan"), float("inf")
    for rows in (40, 4):
        found = make_product(matrix, dtype).linear(x[-rows:])
        assert (~found.isfinite()).all(1).nonzero().flatten().tolist() == ([3, 39] if rows == 40 else [3])


def test_small_scales_stay_exact() -> None:
    """Scales that half precision cannot hold are held whole."""
    matrix = random_matrix(32, 64, WeightFormat(4, 32))
    matrix.scales.mul_(1e-7)
    product = make_product(matrix, torch.bfloat16)
    assert isinstance(product, QuantizedWeight)
    assert product._scales.dtype == torch.float32
    matrix.scales.copy_((matrix.scales * 1e7).half())
    product = make_product(matrix, torch.float32)
    assert isinstance(product, QuantizedWeight)
    assert product._scales.dtype == torch.float16


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", [WeightFormat(4, 32, is_float=True), WeightFormat(4, 32, codebook="iq4_nl")])
def test_codes_of_a_table(format: WeightFormat, dtype: torch.dtype) -> None:
    matrix = random_matrix(70, 96, format)
    for rows in (1, 3, 9, 70):
        check(make_product(matrix, dtype), matrix, torch.randn(rows, 96).to(dtype))
    expected = matrix.dequantized()[[69, 0]].to(dtype)
    torch.testing.assert_close(make_table(matrix, dtype).rows(torch.tensor([69, 0])), expected, rtol=2.0**-10, atol=0)


@pytest.mark.parametrize("bits", [4, 8])
def test_floats_become_numbers_once(bits: int) -> None:
    matrix = random_matrix(64, 64, WeightFormat(bits, 32, is_float=True))
    matrix.codes &= 0x77
    x = torch.randn(3, 64)
    check(make_product(matrix, torch.float32), matrix, x)
    assert torch.equal(make_table(matrix, torch.float32).rows(torch.tensor([5])), matrix.dequantized()[[5]])
