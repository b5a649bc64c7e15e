"""Weights for AMX's tiles, beside torch's product."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.kernels.tiled import TiledWeight, can_tile
from tests.support.tiers import examples

pytestmark = pytest.mark.skipif(
    not can_tile(torch.empty(32, 32, dtype=torch.bfloat16)), reason="this processor has no AMX, or there is no compiler"
)


@given(
    rows=st.one_of(st.integers(0, 70), st.sampled_from([256, 257, 300])),
    outputs=st.sampled_from([32, 64, 96, 640]),
    inputs=st.sampled_from([32, 96, 256, 288, 4096]),
    with_bias=st.booleans(),
    with_residual=st.booleans(),
)
@settings(max_examples=examples(100))
def test_it_is_torchs_product(rows: int, outputs: int, inputs: int, with_bias: bool, with_residual: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight, x = (torch.randn(n, inputs, generator=generator).bfloat16() for n in (outputs, rows))
    bias = torch.randn(outputs, generator=generator).bfloat16() if with_bias else None
    residual = torch.randn(rows, outputs, generator=generator).bfloat16() if with_residual else None
    found = TiledWeight(weight).linear(x, bias, residual)
    expected = F.linear(x.float(), weight.float())
    expected += sum(term.float() for term in (bias, residual) if term is not None)
    torch.testing.assert_close(found.float(), expected, rtol=2**-8, atol=2e-4)


def test_rows_apart_are_read_and_what_is_not_finite_is_seen() -> None:
    weight, x = torch.randn(96, 64).bfloat16(), torch.randn(40, 64).bfloat16()
    weight[70, 3] = float("nan")
    found = TiledWeight(weight).linear(x[::2], None, x.repeat(1, 2)[::2, :96])
    assert found.isnan().any(0).nonzero().tolist() == [[70]]
    assert found.isnan().all(0).nonzero().tolist() == [[70]]


@pytest.mark.parametrize("inputs", [64, 288])
@pytest.mark.parametrize("size", [32, 64, 160])
def test_a_gate_is_part_of_the_product(size: int, inputs: int) -> None:
    weight = torch.randn(2 * size, inputs).bfloat16()
    for rows in (0, 1, 4, 5, 40, 300):
        x = torch.randn(rows, inputs).bfloat16()
        gate, up = F.linear(x.float(), weight.float()).chunk(2, dim=-1)
        found = TiledWeight(weight).gated_silu(x)
        torch.testing.assert_close(found.float(), F.silu(gate) * up, rtol=2**-8, atol=2e-3)


def test_logits_are_not_rounded() -> None:
    weight = torch.randn(96, 64).bfloat16()
    for rows in (1, 7, 40):
        x = torch.randn(rows, 64).bfloat16()
        found = TiledWeight(weight).logits(x)
        torch.testing.assert_close(found, F.linear(x.float(), weight.float()), rtol=1e-5, atol=1e-4)


def test_its_rows_are_the_weights() -> None:
    weight = torch.randn(96, 64).bfloat16()
    assert TiledWeight(weight).rows(torch.tensor([0, 31, 95, 32])).equal(weight[[0, 31, 95, 32]])


@pytest.mark.parametrize("shape", [(48, 64), (64, 48)])
def test_other_sizes_are_left_to_onednn(shape: tuple[int, int]) -> None:
    assert not can_tile(torch.empty(shape, dtype=torch.bfloat16))
    assert not can_tile(torch.empty(64, 64))
