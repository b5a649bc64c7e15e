"""Weights of 16 bits that stay in two bytes, on a processor that does not multiply them as they are."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from gapless.kernels.cpp_library import find
from gapless.kernels.cpp_product import PACKED
from gapless.kernels.processor import multiplies_bfloat16
from gapless.kernels.short_weight import ShortWeight, keep_short

TYPES = [torch.float32, torch.bfloat16]


def product(weight: torch.Tensor, dtype: torch.dtype) -> ShortWeight:
    """Make the product, also on a processor that would take another one."""
    library = find(PACKED, dtype)
    if library is None:
        pytest.skip("needs a C++ compiler")
    return ShortWeight(weight, dtype, library)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("held", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (100, 37), (64, 64), (192, 150)])
def test_it_is_the_product_of_its_numbers(shape: tuple[int, int], held: torch.dtype, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.randn(shape).to(held)
    own = product(weight, dtype)
    for rows in (0, 1, 2, 3, 4, 5, 6, 7, 12, 96, 97, 200):
        x, bias = torch.randn(2 * rows, shape[1]).to(dtype)[::2], torch.randn(shape[0]).to(dtype)
        residual = torch.randn(rows, shape[0]).to(dtype)
        exact = F.linear(x.double(), weight.double())
        wide = {"atol": 1e-4, "rtol": 1e-5}
        torch.testing.assert_close(own.logits(x).double(), exact, **wide)
        exact += bias.double() + residual.double()
        tolerance = wide if dtype == torch.float32 else {"atol": 1e-3, "rtol": 2.0**-8}
        torch.testing.assert_close(own.linear(x, bias, residual).double(), exact, **tolerance)
    ids = torch.tensor([shape[0] - 1, 0])
    assert torch.equal(own.rows(ids), weight[ids].to(dtype))


def test_it_is_kept_where_the_processor_does_not_multiply_bfloat16() -> None:
    weight = torch.randn(64, 64)
    assert keep_short(weight, torch.float32) is None, "it has 32 bits"
    assert keep_short(weight.bfloat16(), torch.float64) is None
    assert (keep_short(weight.bfloat16(), torch.float32) is None) == (
        multiplies_bfloat16() or find(PACKED, torch.float32) is None
    )


def test_what_is_not_finite_is_seen() -> None:
    weight = torch.randn(64, 64).bfloat16()
    weight[5, 60] = float("inf")
    found = product(weight, torch.float32).linear(torch.randn(9, 64))
    assert (~found.isfinite()).all(0).nonzero().tolist() == [[5]]
