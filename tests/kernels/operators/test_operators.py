"""The C++ operators give what torch's give, for any shape; where they cannot be compiled, torch's run."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.conf.errors import ConfigError
from gapless.conf.user_path import user_cache
from gapless.kernels import cpp_library
from gapless.kernels.cpp_build import compile_for
from gapless.models.attention.backend import AttentionSizes
from gapless.models.attention.cpp import CppBackend
from gapless.models.attention.sdpa import SdpaBackend
from gapless.models.batch import RaggedBatch, Segment
from gapless.models.cache_rows import empty_rows, read_rows, write_rows
from gapless.models.head_norm import HeadNorm
from gapless.models.kernels.cpp import CppKernels
from gapless.models.kernels.kernels import TorchKernels
from gapless.models.kernels.select import make_kernels
from tests.support.tiers import examples

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def cpp(request: pytest.FixtureRequest) -> CppKernels:
    return CppKernels(request.param)


def cache(K: int, slots: int, D: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Make a cache as on a CPU: the keys of a head are contiguous."""
    return torch.randn(K, slots, D).to(dtype).transpose(0, 1)


def assert_rounded_once(found: torch.Tensor, exact: torch.Tensor) -> None:
    """Compare with what torch's operators give in float32 of the same inputs."""
    assert found.dtype == torch.bfloat16 or found.dtype == exact.dtype
    tolerance = {"rtol": 2**-8, "atol": 1e-6} if found.dtype == torch.bfloat16 else {}
    torch.testing.assert_close(found.float(), exact, equal_nan=True, **tolerance)


@pytest.mark.parametrize(("T", "H"), [(0, 8), (1, 8), (3, 37), (200, 768)])
def test_norm_and_gate(cpp: CppKernels, T: int, H: int) -> None:
    plain, weight = TorchKernels(), torch.randn(H).to(cpp.dtype)
    x, hidden = (torch.randn(T, H) * 3).to(cpp.dtype), (torch.randn(T, 2 * H) * 20).to(cpp.dtype)
    assert_rounded_once(cpp.norm(x, None, weight, None, 1e-5), plain.norm(x.float(), None, weight.float(), None, 1e-5))
    assert_rounded_once(cpp.gated_silu(hidden), plain.gated_silu(hidden.float()))


@pytest.mark.parametrize("with_bias", [True, False], ids=["layer norm", "rms norm"])
@pytest.mark.parametrize(("T", "H"), [(0, 8), (1, 8), (3, 37), (200, 768)])
def test_the_sum_is_normed_in_the_same_pass(cpp: CppKernels, T: int, H: int, with_bias: bool) -> None:
    x, term = ((torch.randn(T, H) * 3 + 1).to(cpp.dtype) for _ in range(2))
    weight, bias = torch.randn(H).to(cpp.dtype), torch.randn(H).to(cpp.dtype) if with_bias else None
    total = x + term
    exact = TorchKernels().norm(total.double(), None, weight.double(), None if bias is None else bias.double(), 1e-5)
    for found in (cpp.norm(x, term, weight, bias, 1e-5), cpp.norm(total, None, weight, bias, 1e-5)):
        assert_rounded_once(found, exact.float())
    assert torch.equal(x, total)


@pytest.mark.parametrize("rotated", [True, False])
def test_heads_are_normed_and_rotated_with_one_rounding(cpp: CppKernels, rotated: bool) -> None:
    T, K, G, D = 9, 2, 3, 24
    norm = HeadNorm(D, 1e-5, dtype=cpp.dtype, device=CPU)
    qkv, angles, slots = torch.randn(T, K, G + 2, D).to(cpp.dtype), torch.randn(T, 1, 1, D // 2), torch.randperm(T)
    rope = (angles.cos().to(cpp.dtype), angles.sin().to(cpp.dtype)) if rotated else None
    with torch.inference_mode():
        for weight in norm.parameters():
            weight.normal_()
        found, exact = [[cache(K, T, D, dtype).zero_() for _ in range(2)] for dtype in (cpp.dtype, torch.float64)]
        queries = cpp.rotate_and_write(qkv, norm, rope, slots, *found)
        exact_rope = (rope[0].double(), rope[1].double()) if rope else None
        wanted = TorchKernels().rotate_and_write(qkv.double(), norm.double(), exact_rope, slots, *exact)
    for own, true in zip([queries, *found], [wanted, *exact], strict=True):
        assert_rounded_once(own, true.float())


def test_extremes_of_the_gate(cpp: CppKernels) -> None:
    gate = torch.tensor([-200.0, -88.0, -87.0, -1e-8, 0.0, 87.5, 88.5, 3e38, float("inf"), float("nan")])
    hidden = torch.stack([torch.cat([gate, torch.ones_like(gate)])]).to(cpp.dtype)
    assert_rounded_once(cpp.gated_silu(hidden), TorchKernels().gated_silu(hidden.float()))


@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.parametrize(("T", "K", "G", "D"), [(1, 1, 1, 2), (5, 2, 3, 12), (70, 4, 3, 64)])
def test_rotation_and_writes(cpp: CppKernels, rotated: bool, T: int, K: int, G: int, D: int) -> None:
    qkv = torch.randn(T, K, G + 2, D).to(cpp.dtype)
    angles = torch.randn(T, 1, 1, D // 2)
    rope = (angles.cos().to(cpp.dtype), angles.sin().to(cpp.dtype)) if rotated else None
    slots = torch.randperm(T + 3)[:T]
    found, exact = [[cache(K, T + 3, D, dtype).zero_() for _ in range(2)] for dtype in (cpp.dtype, torch.float32)]
    queries = cpp.rotate_and_write(qkv, None, rope, slots, *found)
    exact_rope = (rope[0].float(), rope[1].float()) if rope else None
    assert_rounded_once(queries, TorchKernels().rotate_and_write(qkv.float(), None, exact_rope, slots, *exact))
    for own, wanted in zip(found, exact, strict=True):
        assert_rounded_once(own, wanted)


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
    tested = CppBackend(CppKernels(dtype), AttentionSizes(block_size=4, window=window), sdpa=sdpa)
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


def test_what_is_not_finite_stays_so(cpp: CppKernels) -> None:
    """A NaN in a key makes its attention NaN, so that the sampler can see it."""
    batch = RaggedBatch.of([0] * 4, [Segment(0, 3, [0])], [Segment(2, 1, [1])], [])
    q, keys, values = torch.randn(4, 1, 2, 64).to(cpp.dtype), cache(1, 8, 64, cpp.dtype), cache(1, 8, 64, cpp.dtype)
    keys[1], keys[5] = float("nan"), float("nan")
    backend = CppBackend(cpp, AttentionSizes(block_size=4))
    out = backend.attend(q, keys, values, backend.plan(batch)).isnan().any(-1)
    assert out.tolist() == [False, True, True, True]


def test_without_a_compiler_torchs_operators_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compile_for("float32")
    shutil.copytree(user_cache(), tmp_path / "open" / "gapless", ignore=shutil.ignore_patterns("build-*"))
    (tmp_path / "open" / "gapless").chmod(0o777)
    for cache, compiler, why in [
        ("empty", "/nowhere/c++", "No such file"),
        ("empty", "false", "false failed"),
        ("open", "false", "gapless can be written to by anyone"),
    ]:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / cache))
        monkeypatch.setenv("CXX", compiler)
        cpp_library.load.cache_clear()
        own = make_kernels("auto", dtype=torch.float32, device=CPU)
        assert isinstance(own, TorchKernels)
        assert re.search(rf"{why}.*; install a wheel that has kernels for this processor, or GCC$", own.fallback_reason)
        with pytest.raises(ConfigError, match=rf"model\.kernels=cpp: .*({why}).*; torch runs anywhere"):
            make_kernels("cpp", dtype=torch.float32, device=CPU)
    cpp_library.load.cache_clear()
    with pytest.raises(ConfigError, match="for float32 and bfloat16 on a CPU"):
        make_kernels("cpp", dtype=torch.float16, device=CPU)
    for name, dtype in [("torch", torch.float32), ("auto", torch.float16)]:
        own = make_kernels(name, dtype=dtype, device=CPU)
        assert isinstance(own, TorchKernels)
        assert own.fallback_reason == ""
