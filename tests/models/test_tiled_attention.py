"""Attention by AMX tiles, beside plain attention over the whole text of each request."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.kernels.operators.select import make_kernels
from gapless.models.attention.backend import AttentionSizes
from gapless.models.attention.select import make_backend
from gapless.models.attention.tiled import TiledBackend, runs
from gapless.models.batch import RaggedBatch, Segment
from gapless.models.kv_cache import KVCache, slots_of
from tests.models.test_attention import full_attention
from tests.support.tiers import examples

CPU = torch.device("cpu")

HAS_TILES = runs(AttentionSizes(block_size=16, head_dim=32, dtype=torch.bfloat16))
pytestmark = pytest.mark.skipif(not HAS_TILES, reason="this processor has no AMX, or there is no compiler")


def backend_of(head_dim: int, block_size: int = 16, cache_dtype: str = "auto", **keys: Any) -> object:
    """Choose the backend of a CPU in bfloat16."""
    kernels = make_kernels("auto", dtype=torch.bfloat16, device=CPU)
    sizes = {"block_size": block_size, "head_dim": head_dim, "cache_dtype": cache_dtype}
    return make_backend("auto", kernels, AttentionSizes(**sizes, dtype=torch.bfloat16), **keys)  # type: ignore[arg-type]


@given(
    chunks=st.lists(st.tuples(st.integers(0, 150), st.integers(1, 90)), max_size=3),
    decodes=st.lists(st.integers(0, 300), max_size=3),
    sizes=st.sampled_from([(1, 1, 32), (2, 3, 64), (1, 16, 96), (2, 20, 32), (1, 71, 64), (1, 4, 128)]),
    block_size=st.sampled_from([16, 48]),
    window=st.sampled_from([None, 1, 7, 64, 130]),
    softcap=st.sampled_from([None, 0.7]),
    has_sinks=st.booleans(),
    seed=st.integers(0, 9),
)
@settings(max_examples=examples(60), deadline=None)
def test_it_is_plain_attention(
    chunks: list[tuple[int, int]],
    decodes: list[int],
    sizes: tuple[int, int, int],
    block_size: int,
    window: int | None,
    softcap: float | None,
    has_sinks: bool,
    seed: int,
) -> None:
    """Slots that were never written, and those of others, hold NaN."""
    K, G, D = sizes
    random = torch.Generator().manual_seed(seed)
    wanted = [*chunks, *((start, 1) for start in decodes)]
    needed = [-(-(start + length) // block_size) for start, length in wanted]
    blocks = torch.randperm(sum(needed), generator=random).split(needed)
    cache = KVCache(
        places=[0],
        num_blocks=sum(needed),
        block_size=block_size,
        num_kv_heads=K,
        head_dim=D,
        dtype=torch.bfloat16,
        device=CPU,
    )
    keys, values = cache.keys[0].fill_(float("nan")), cache.values[0].fill_(float("nan"))
    sinks = torch.randn(K * G, generator=random) if has_sinks else None
    queries, expected, segments = [torch.empty(0, K, G, D)], [torch.empty(0, K * G * D)], []
    for (start, length), own in zip(wanted, blocks, strict=True):
        n = start + length
        q, k, v = (torch.randn(n, K, *more, generator=random).bfloat16() for more in ((G, D), (D,), (D,)))
        segments.append(Segment(start, length, own.numpy()))
        slots = slots_of(own.numpy(), 0, n, block_size)
        slots = torch.tensor(list(slots))
        keys[slots], values[slots] = k, v
        queries.append(q[start:])
        expected.append(full_attention(q, k, v, window, softcap, sinks)[start:])
    q = torch.cat(queries).bfloat16()
    batch = RaggedBatch.of([0] * len(q), segments[: len(chunks)], segments[len(chunks) :], [])
    backend = TiledBackend(AttentionSizes(block_size=block_size, window=window), softcap=softcap)
    found = backend.attend(q, keys, values, backend.plan(batch), sinks)
    torch.testing.assert_close(found.double(), torch.cat(expected).double(), rtol=2**-6, atol=2**-6)


def test_it_is_chosen_where_its_tiles_fit() -> None:
    assert isinstance(backend_of(64), TiledBackend)
    assert isinstance(backend_of(64, softcap=30.0, has_sinks=True), TiledBackend)
    assert not isinstance(backend_of(48), TiledBackend)
    assert not isinstance(backend_of(64, block_size=8), TiledBackend)
    assert not isinstance(backend_of(64, cache_dtype="int8"), TiledBackend)
