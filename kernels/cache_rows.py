"""Writes and reads rows of the KV cache with torch's operators. A row is one head's key or value of one token.

An 8-bit row has D elements of the type `cache.dtype`, followed at the next multiple of 4 bytes by a float32 scale. The
scale is the row's largest absolute value over the largest value of the type. So the rounding error is at most 1/254 of
the largest value (`int8`), or 1/16 of the value itself (`fp8`, e4m3 of OCP's 8-bit floating point specification).
"""

from __future__ import annotations

import torch
from torch import Tensor

CACHE_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
CPP_CACHE = "ippi"  # how C++ takes a layer's cache (`cpp_cache`): kind of its elements, keys, values, stride of heads
_CPP_KINDS = {CACHE_DTYPES["int8"]: 1, CACHE_DTYPES["fp8"]: 2}  # 0: the C++ file's element type
_MOST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def write_rows(cache_SKD: Tensor, slots_T: Tensor, x_TKD: Tensor) -> None:
    """Write keys or values to their slots of the cache. An 8-bit row with a non-finite value becomes NaN."""
    dtype = cache_SKD.dtype
    if dtype not in _MOST:
        cache_SKD.index_copy_(0, slots_T, x_TKD)
        return
    x = x_TKD.float()
    largest = x.abs().amax(-1, keepdim=True)
    scales = torch.where(largest.isfinite(), largest / _MOST[dtype], torch.nan)
    codes = (x * torch.where(largest > 0, _MOST[dtype] / largest, 0)).clamp_(-_MOST[dtype], _MOST[dtype])
    codes = codes.nan_to_num_(0).round_().to(dtype) if dtype == torch.int8 else codes.to(dtype)
    rows = x.new_zeros(*x.shape[:-1], cache_SKD.shape[-1], dtype=torch.uint8)
    rows[..., : x.shape[-1]] = codes.view(torch.uint8)
    rows[..., -4:] = scales.view(torch.uint8)
    cache_SKD.view(torch.uint8).index_copy_(0, slots_T, rows)


def read_rows(cache_SKD: Tensor, slots: slice | Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Return keys or values at `slots`, [slots, K, D], in `dtype`. A cache without scales already has this type.

    The result is a view of the cache if that has no scales and `slots` is a slice.
    """
    dtype_of_rows = cache_SKD.dtype
    raw = cache_SKD.view(torch.int8) if dtype_of_rows in _MOST else cache_SKD
    rows = raw[slots] if isinstance(slots, slice) else raw.index_select(0, slots)
    if dtype_of_rows not in _MOST:
        return rows
    codes, scales = rows[..., :head_dim], rows[..., -4:].view(torch.float32)
    if dtype_of_rows == CACHE_DTYPES["int8"]:
        return (codes.float() * scales).to(dtype)
    # The same bits as float16 are 256 times smaller; torch's own conversion takes five times as long on a CPU.
    halves = codes.to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000).view(torch.float16)
    return (halves.float() * (256 * scales)).to(dtype)


def cpp_cache(keys_SKD: Tensor, values_SKD: Tensor) -> tuple[int, int, int, int]:
    """Return the `CPP_CACHE` arguments for a layer's cache, laid out as [K, S, D]."""
    assert keys_SKD.stride()[::2] == values_SKD.stride()[::2] == (keys_SKD.shape[2], 1)
    return _CPP_KINDS.get(keys_SKD.dtype, 0), keys_SKD.data_ptr(), values_SKD.data_ptr(), keys_SKD.stride(1)
