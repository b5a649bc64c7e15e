"""Packed weights: oneDNN's product, and our own for few rows, beside torch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.parallel import packed
from gapless.parallel.packed import PackedWeight
from tests.support.tiers import examples

SIZES = st.sampled_from([(64, 16), (128, 80), (192, 64), (640, 128), (512, 144), (100, 48), (64, 50), (7, 5)])


@given(
    rows=st.one_of(st.integers(0, 20), st.sampled_from([48, 63, 64, 65, 130])),
    size=SIZES,
    with_bias=st.booleans(),
    with_residual=st.booleans(),
)
@settings(max_examples=examples(120))
def test_it_is_torchs_product(rows: int, size: tuple[int, int], with_bias: bool, with_residual: bool) -> None:
    outputs, inputs = size
    generator = torch.Generator().manual_seed(rows)
    weight, x = (torch.randn(n, inputs, generator=generator) for n in (outputs, rows))
    bias = torch.randn(outputs, generator=generator) if with_bias else None
    residual = torch.randn(rows, outputs, generator=generator) if with_residual else None
    expected = F.linear(x, weight, bias) + (0 if residual is None else residual)
    product = PackedWeight(weight)
    for own in (product._address, None):
        product._address = own
        torch.testing.assert_close(product.linear(x, bias, residual), expected, rtol=1e-4, atol=1e-4)


def test_few_rows_have_our_product_where_the_layout_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """And rows that lie apart are read, and what is not finite is seen."""
    weight, x = torch.randn(512, 64), torch.randn(8, 64)
    weight[70, 3] = float("nan")
    product = PackedWeight(weight)
    if product._address is None:
        pytest.skip("oneDNN has another layout on this processor, or there is no compiler")
    calls = []
    monkeypatch.setattr(PackedWeight, "_few_rows", lambda *a: calls.append(a) or F.linear(a[1], weight))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    product.linear(x)
    product.linear(torch.randn(65, 64))
    assert len(calls) == 1
    monkeypatch.undo()
    found = product._few_rows(x[::2], None, x.repeat(1, 8)[::2])
    expected = F.linear(x[::2], weight) + x.repeat(1, 8)[::2]
    torch.testing.assert_close(found, expected, equal_nan=True, rtol=1e-4, atol=1e-4)
    assert found.isnan().any(0).nonzero().tolist() == [[70]]


def test_a_layout_that_is_not_ours_is_left_to_onednn() -> None:
    """The values are compared, so that a changed layout is never misread."""
    weight = torch.randn(128, 64)
    reordered = torch.ops.mkldnn._reorder_linear_weight(weight, 256)
    for row in (5, 120):
        other = weight.clone()
        other[row, 7] += 1
        assert packed._address(reordered, other) is None
