"""Packed weights: oneDNN's product, and our own for few rows, beside torch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.kernels import packed
from gapless.kernels.cpp_library import find
from gapless.kernels.cpp_product import PACKED, CppProduct
from gapless.kernels.packed import PackedWeight, pack
from gapless.kernels.processor import multiplies_bfloat16
from gapless.kernels.short_weight import ShortWeight
from gapless.kernels.tiled import TiledWeight
from gapless.parallel.groups import Groups
from gapless.parallel.layers import LMHead, VocabParallelEmbedding
from gapless.parallel.mesh import Mesh
from gapless.parallel.rendezvous import Rendezvous
from tests.support.tiers import examples

SIZES = st.sampled_from([(64, 16), (128, 80), (192, 64), (640, 128), (512, 144), (100, 48), (64, 50), (7, 5)])

DTYPES = [torch.float32, *([torch.bfloat16] if torch.ops.mkldnn._is_mkldnn_bf16_supported() else [])]
TOLERANCES = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-4},
    torch.bfloat16: {"rtol": 2**-8, "atol": 1e-4},
}  # rounded once


def exact(x: torch.Tensor, weight: torch.Tensor, *terms: torch.Tensor | None) -> torch.Tensor:
    """Compute the product and the sum of all terms in float32."""
    return F.linear(x.float(), weight.float()) + sum(term.float() for term in terms if term is not None)


@given(
    rows=st.one_of(st.integers(0, 20), st.sampled_from([48, 63, 64, 65, 130])),
    size=SIZES,
    with_bias=st.booleans(),
    with_residual=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
@settings(max_examples=examples(120))
def test_it_is_torchs_product(
    rows: int, size: tuple[int, int], with_bias: bool, with_residual: bool, dtype: torch.dtype
) -> None:
    outputs, inputs = size
    generator = torch.Generator().manual_seed(rows)
    weight, x = (torch.randn(n, inputs, generator=generator).to(dtype) for n in (outputs, rows))
    bias = torch.randn(outputs, generator=generator).to(dtype) if with_bias else None
    residual = torch.randn(rows, outputs, generator=generator).to(dtype) if with_residual else None
    product = PackedWeight(weight)
    for most_rows in (64 if product._block else 0, 0):
        product._most_rows = most_rows
        torch.testing.assert_close(
            product.linear(x, bias, residual).float(), exact(x, weight, bias, residual), **TOLERANCES[dtype]
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_few_rows_have_our_product_where_the_layout_is_known(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And rows that lie apart are read, and what is not finite is seen."""
    weight, x = torch.randn(512, 64).to(dtype), torch.randn(4, 64).to(dtype)
    weight[70, 3] = float("nan")
    product = PackedWeight(weight)
    if not product._block:
        pytest.skip("oneDNN has another layout on this processor, or there is no compiler")
    calls = []
    monkeypatch.setattr(CppProduct, "linear", lambda *a: calls.append(a) or F.linear(a[1], weight))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    product.linear(x)
    product.linear(torch.randn(65, 64).to(dtype))
    assert len(calls) == 1
    monkeypatch.undo()
    found = CppProduct.linear(product, x[::2], None, x.repeat(1, 8)[::2])
    expected = exact(x[::2], weight, x.repeat(1, 8)[::2])
    torch.testing.assert_close(found.float(), expected, equal_nan=True, **TOLERANCES[dtype])
    assert found.isnan().any(0).nonzero().tolist() == [[70]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layout_that_is_not_ours_is_left_to_onednn(dtype: torch.dtype) -> None:
    """The values are compared, so that a changed layout is never misread."""
    weight = torch.randn(128, 64).to(dtype)
    reordered = torch.ops.mkldnn._reorder_linear_weight(weight, 256)
    for row in (5, 120):
        other = weight.clone()
        other[row, 7] += 1
        assert packed._find_block(reordered, other) == 0


@given(
    blocks=st.integers(1, 5),
    size=st.integers(1, 40),
    ids=st.lists(st.integers(0, 63), max_size=9),
    dtype=st.sampled_from(DTYPES),
)
@settings(max_examples=examples(60), deadline=None)
def test_rows_are_those_that_were_packed(blocks: int, size: int, ids: list[int], dtype: torch.dtype) -> None:
    weight = torch.randn(64 * blocks, 2 * size, generator=torch.Generator().manual_seed(size)).to(dtype)
    table = PackedWeight(weight)
    if table.can_be_read:  # oneDNN pads some sizes
        at = torch.tensor([n * blocks for n in ids], dtype=torch.int64)
        assert torch.equal(table.rows(at), weight[at])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [512, 100])
def test_a_tied_head_and_its_embedding_hold_one_weight(vocab: int, dtype: torch.dtype) -> None:
    """The smaller vocabulary is no multiple of 32: its weight stays as it was loaded, and one of float32.

    A processor that does not multiply bfloat16 keeps such a weight in two bytes, of any vocabulary.
    """
    is_short = dtype == torch.bfloat16 and not multiplies_bfloat16() and find(PACKED, dtype) is not None
    is_packed = is_short or (vocab == 512 and dtype == torch.bfloat16)
    with Groups.start(Rendezvous(0, 1, device="cpu"), Mesh(1, 1), 60.0) as groups:
        embedding = VocabParallelEmbedding(vocab, 64, dtype=dtype, groups=groups)
        head = LMHead(64, vocab, dtype=dtype, groups=groups)
        weight = torch.randn(len(embedding.weight), 64).to(dtype)
        embedding.weight.data.copy_(weight)
        head.tie(embedding)
        for module in (embedding, head):
            module.pack()
        layout = ShortWeight if is_short else PackedWeight | TiledWeight
        assert isinstance(head.packed, layout) == is_packed
        assert len(head.weight) == len(embedding.weight) == (0 if is_packed else len(weight))
        ids = torch.tensor([3, 99, 0])
        assert torch.equal(embedding(ids), weight[ids])
        for rows in (1, 5, 130):
            x = torch.randn(rows, 64).to(dtype)
            expected = F.linear(x.float(), weight.float())[:, :vocab]
            tolerance = 1e-4 if dtype == torch.float32 else 2**-7
            torch.testing.assert_close(head(x), expected, rtol=tolerance, atol=8 * tolerance)


def test_other_types_stay() -> None:
    for dtype in (torch.float16, torch.float32):
        assert pack(torch.empty(64, 8, dtype=dtype), is_table=True) is None
