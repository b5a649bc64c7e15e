"""The product of few rows with a weight that stays as it was loaded."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.kernels import cpp_library
from gapless.kernels.cpp_library import CppFile, NoLibraryError
from gapless.kernels.row_weight import take_rows
from tests.support.tiers import examples


@given(
    rows=st.one_of(st.integers(0, 20), st.just(130)),
    outputs=st.integers(1, 70),
    size=st.integers(1, 90),
    with_bias=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=examples(80))
def test_it_is_torchs_product(rows: int, outputs: int, size: int, with_bias: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rows + 100 * outputs)
    x, weight = (torch.randn(n, size, generator=generator).to(dtype) for n in (rows, outputs))
    bias = torch.randn(outputs, generator=generator).to(dtype) if with_bias else None
    product = take_rows(weight)
    assert product is not None
    expected = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    tolerance = 1e-4 if dtype == torch.float32 else 2**-7  # bfloat16 is rounded before the bias and after it
    torch.testing.assert_close(product.linear(x, bias).float(), expected, rtol=tolerance, atol=tolerance * 4)


def test_it_reads_what_is_not_finite_and_rows_that_lie_apart() -> None:
    x, weight = torch.randn(4, 32), torch.randn(40, 32)
    weight[7, 31] = float("nan")
    product = take_rows(weight)
    assert product is not None
    found = product.linear(x[::2])
    assert found.isnan().any(0).nonzero().tolist() == [[7]]
    torch.testing.assert_close(found, F.linear(x[::2], weight), equal_nan=True, rtol=1e-4, atol=1e-4)


def test_torchs_product_stays_for_other_types_and_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    assert take_rows(torch.randn(4, 4, dtype=torch.float16)) is None

    def fail(file: CppFile, dtype: torch.dtype) -> None:
        raise NoLibraryError("there is no C++ compiler")

    cpp_library.find.cache_clear()
    monkeypatch.setattr(cpp_library, "load", fail)
    assert take_rows(torch.randn(4, 4)) is None
    cpp_library.find.cache_clear()
