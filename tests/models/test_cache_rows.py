"""Rows of 8 bits: what is written is read again, by C++ and by torch alike, to half a step of the largest number."""

from __future__ import annotations

import pytest
import torch

from gapless.conf.errors import ConfigError
from gapless.kernels.attention import PagedAttention
from gapless.kernels.cache_rows import CACHE_DTYPES, read_rows, write_rows
from gapless.kernels.operators.base import TorchKernels
from gapless.kernels.operators.cpp import CppKernels
from gapless.models.attention.backend import AttentionSizes
from gapless.models.attention.cpp import CppBackend
from gapless.models.attention.select import make_backend
from gapless.models.batch import RaggedBatch, Segment
from gapless.models.kv_cache import empty_rows

CPU = torch.device("cpu")


def caches(K: int, slots: int, D: int, cache_dtype: str) -> list[torch.Tensor]:
    return [empty_rows(K, slots, D, dtype=torch.float32, cache_dtype=cache_dtype, device=CPU) for _ in range(2)]


def written(
    kernels: CppKernels | TorchKernels, qkv: torch.Tensor, slots: torch.Tensor, cache_dtype: str
) -> list[torch.Tensor]:
    """Write keys and values, and read them again, [2][T, K, D]."""
    _, K, _, D = qkv.shape
    rows = caches(K, int(slots.max()) + 1, D, cache_dtype)
    kernels.rotate_and_write(qkv, None, None, slots, *rows)
    return [read_rows(each, slots, D, torch.float32) for each in rows]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("cache_dtype", list(CACHE_DTYPES))
@pytest.mark.parametrize(("T", "K", "G", "D"), [(1, 1, 1, 2), (5, 2, 3, 22), (300, 3, 3, 64)])
def test_rows_are_read_as_they_were_written(
    cache_dtype: str, dtype: torch.dtype, T: int, K: int, G: int, D: int
) -> None:
    qkv = (torch.randn(T, K, G + 2, D) * torch.logspace(-6, 3, T)[:, None, None, None]).to(dtype)
    qkv[0, 0, -1] = 0.0
    slots = torch.randperm(T + 3)[:T]
    found = [written(kernels, qkv, slots, cache_dtype) for kernels in (CppKernels(dtype), TorchKernels())]
    for own, of_torch, true in zip(*found, (qkv[:, :, -2].float(), qkv[:, :, -1].float()), strict=True):
        largest = true.abs().amax(-1, keepdim=True)
        off = largest / 254 if cache_dtype == "int8" else torch.maximum(true.abs() / 16, largest / 448 / 2**10)
        for each in (own, of_torch):
            assert ((each - true).abs() <= off * 1.001).all()
        assert ((own - of_torch).abs() > 1e-6 * largest).float().mean() < 0.01  # numbers halfway between two


@pytest.mark.parametrize("cache_dtype", list(CACHE_DTYPES))
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_head_that_is_not_finite_becomes_nan(cache_dtype: str, bad: float) -> None:
    qkv = torch.randn(3, 2, 3, 16)
    qkv[1, 0, :, 5] = bad
    for kernels in (CppKernels(torch.float32), TorchKernels()):
        for found in written(kernels, qkv, torch.tensor([4, 0, 2]), cache_dtype):
            assert found.isnan().all(-1).tolist() == [[False, False], [True, False], [False, False]]
            assert found.isnan().any(-1).sum() == 1


def test_every_number_of_fp8_is_read_exactly() -> None:
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
    numbers = codes.view(CACHE_DTYPES["fp8"]).float()
    D = len(numbers)
    (keys, _), scale = caches(1, 1, D, "fp8"), torch.tensor([448.0])
    write_rows(keys, torch.tensor([0]), numbers.view(1, 1, D) * scale / 448)
    assert torch.equal(read_rows(keys, slice(0, 1), D, torch.float32).view(-1), numbers)
    for dtype in (torch.float32, torch.bfloat16):  # attention to one key alone is its value
        q, own = torch.randn(1, 1, 1, D).to(dtype), [Segment(0, 1, [0])]
        backend = CppBackend(PagedAttention(dtype), AttentionSizes(block_size=1, window=9))
        for batch in (RaggedBatch.of([0], own, [], []), RaggedBatch.of([0], [], own, [])):
            assert torch.equal(backend.attend(q, keys, keys, backend.plan(batch)).view(-1).float(), numbers)


@pytest.mark.parametrize("name", ["flash", "xformers"])
def test_backends_that_read_no_rows_of_8_bits_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"gapless.models.attention.{name}.why_not", lambda *_: None)
    sizes = {"block_size": 4, "num_blocks": 4, "window": None, "dtype": torch.bfloat16, "device": CPU, "head_dim": 8}
    with pytest.raises(ConfigError, match=rf"attention={name}: reads keys in the model's dtype, not cache.dtype=int8"):
        make_backend(name, TorchKernels(), AttentionSizes(**sizes, cache_dtype="int8"))
