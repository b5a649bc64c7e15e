"""The C++ operators give what torch's give, for any shape; where they cannot be compiled, torch's run."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch

from gapless.conf.errors import ConfigError
from gapless.conf.user_path import user_cache
from gapless.kernels import cpp_library
from gapless.kernels.cpp_build import compile_for
from gapless.kernels.head_norm import HeadNorm
from gapless.kernels.operators.base import TorchKernels
from gapless.kernels.operators.cpp import CppKernels
from gapless.kernels.operators.select import make_kernels

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
