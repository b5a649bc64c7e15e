"""Writes and reads rows of the KV cache with torch's operators: a head's key or value of one token is a row.

A row of 8 bits has D numbers, which `cache.dtype` names, and behind them, at the next multiple of 4 bytes, their scale
in float32. It is the largest of the head over the largest number of the type, so that each is off by at most 1/254 of
the largest (`int8`), or by 1/16 of itself (`fp8`, e4m3 of OCP's 8-bit floating point specification).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .memory import kv_row_width

CACHE_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_MOST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def write_rows(cache_SKD: Tensor, slots_T: Tensor, x_TKD: Tensor) -> None:
    """Write keys or values to their slots of the cache. A head with a number that is not finite becomes NaN."""
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
    """Return keys or values at `slots`, [slots, K, D], in `dtype`, which is the cache's where that has no scales.

    They are a view of the cache where that has no scales and the slots are consecutive.
    """
    dtype_of_rows = cache_SKD.dtype
    raw = cache_SKD.view(torch.int8) if dtype_of_rows in _MOST else cache_SKD
    rows = raw[slots] if isinstance(slots, slice) else raw.index_select(0, slots)
    if dtype_of_rows not in _MOST:
        return rows
    codes, scales = rows[..., :head_dim], rows[..., -4:].view(torch.float32)
    if dtype_of_rows == CACHE_DTYPES["int8"]:
        return (codes.float() * scales).to(dtype)
    # With the same bits a float16 is 256 times smaller; torch's own conversion takes five times as long on a CPU.
    halves = codes.to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000).view(torch.float16)
    return (halves.float() * (256 * scales)).to(dtype)


def empty_rows(
    num_kv_heads: int, num_slots: int, head_dim: int, *, dtype: torch.dtype, cache_dtype: str, device: torch.device
) -> Tensor:
    """Make a cache of keys or values that is not initialized, [S, K, D], or [S, K, width] for rows of 8 bits."""
    stored = CACHE_DTYPES.get(cache_dtype, dtype)
    width = kv_row_width(head_dim, cache_dtype)
    if device.type == "cpu":
        # A head's keys are contiguous in memory, which makes a decode twice as fast: reading them bounds it.
        return torch.empty(num_kv_heads, num_slots, width, dtype=stored, device=device).transpose(0, 1)
    return torch.empty(num_slots, num_kv_heads, width, dtype=stored, device=device)
