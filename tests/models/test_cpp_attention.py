"""Attention in C++ gives what torch's gives, for any batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.kernels.attention import PagedAttention
from gapless.kernels.cache_rows import read_rows, write_rows
from gapless.models.attention.backend import AttentionSizes
from gapless.models.attention.cpp import CppBackend
from gapless.models.attention.sdpa import SdpaBackend
from gapless.models.batch import RaggedBatch, Segment
from gapless.models.kv_cache import empty_rows
from tests.support.tiers import examples

CPU = torch.device("cpu")


@st.composite
def batches(draw: st.DrawFn) -> tuple[RaggedBatch, int]:
    """Draw a ragged batch over blocks of 4 in any order, and the blocks of its cache."""
    lengths = draw(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 200)), max_size=3))
    contexts = draw(st.lists(st.integers(0, 300), min_size=0 if lengths else 1, max_size=6))
    sizes = [*lengths, *((start, 1) for start in contexts)]
    counts = [-(-(start + length) // 4) for start, length in sizes]
    order = draw(st.sampled_from([sorted, lambda blocks: sorted(blocks, key=lambda b: b * 7919 % 1009)]))
    free = order(range(sum(counts)))
    segments = []
    for (start, length), count in zip(sizes, counts, strict=True):
        segments.append(Segment(start, length, free[:count]))
        free = free[count:]
    chunks, decodes = segments[: len(lengths)], segments[len(lengths) :]
    num = sum(length for _, length in sizes)
    return RaggedBatch.of([0] * num, chunks, decodes, []), sum(counts)


@given(
    found=batches(),
    heads=st.sampled_from([(1, 1, 64), (2, 3, 64), (1, 4, 128), (3, 1, 20), (1, 2, 84), (1, 100, 8)]),
    window=st.sampled_from([None, 1, 5, 130]),
    seed=st.integers(0, 99),
    kind=st.sampled_from([(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]),
    cache_dtype=st.sampled_from(["auto", "auto", "int8", "fp8"]),
)
@settings(max_examples=examples(60))
def test_attention(
    found: tuple[RaggedBatch, int],
    heads: tuple[int, int, int],
    window: int | None,
    seed: int,
    kind: tuple[torch.dtype, bool],
    cache_dtype: str,
) -> None:
    """Over chunks and decodes, pages in any order, groups of queries, head sizes, windows and types of the cache."""
    (batch, blocks), (K, G, D), (dtype, chunks_by_sdpa) = found, heads, kind
    torch.manual_seed(seed)
    q = torch.randn(batch.num_tokens, K, G, D).to(dtype)
    keys, values = (empty_rows(K, 4 * blocks, D, dtype=dtype, cache_dtype=cache_dtype, device=CPU) for _ in range(2))
    for each in (keys, values):
        write_rows(each, torch.arange(4 * blocks), torch.randn(4 * blocks, K, D).to(dtype))
    sdpa = SdpaBackend(AttentionSizes(block_size=4, window=window, dtype=dtype)) if chunks_by_sdpa else None
    tested = CppBackend(PagedAttention(dtype), AttentionSizes(block_size=4, window=window), sdpa=sdpa)
    exact = SdpaBackend(AttentionSizes(block_size=4, window=window, dtype=torch.float64))
    exact_rows = [read_rows(each, slice(None), D, torch.float64).double() for each in (keys, values)]
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2**-8, "atol": 1e-5}
    if chunks_by_sdpa:
        tolerance = {"rtol": 2**-7, "atol": 1e-2}
    torch.testing.assert_close(
        tested.attend(q, keys, values, tested.plan(batch)).double(),
        exact.attend(q.double(), *exact_rows, exact.plan(batch)),
        **tolerance,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_what_is_not_finite_stays_so(dtype: torch.dtype) -> None:
    """A NaN in a key makes its attention NaN, so that the sampler can see it."""
    batch = RaggedBatch.of([0] * 4, [Segment(0, 3, [0])], [Segment(2, 1, [1])], [])
    q = torch.randn(4, 1, 2, 64).to(dtype)
    keys, values = (torch.randn(1, 8, 64).to(dtype).transpose(0, 1) for _ in range(2))
    keys[1], keys[5] = float("nan"), float("nan")
    backend = CppBackend(PagedAttention(dtype), AttentionSizes(block_size=4))
    out = backend.attend(q, keys, values, backend.plan(batch)).isnan().any(-1)
    assert out.tolist() == [False, True, True, True]
