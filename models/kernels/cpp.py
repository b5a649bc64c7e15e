"""The small operators in C++, for float32 and bfloat16 on a CPU."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...parallel.cpp_library import load
from ..cache_rows import CACHE_DTYPES
from ..head_norm import HeadNorm

_CACHE = (c_int64, c_void_p, c_void_p, c_int64)  # kind of its numbers, keys, values, stride of a head
_SIGNATURES = {
    "add_and_norm": (*5 * (c_void_p,), c_int64, c_int64, c_float),
    "gated_silu": (c_void_p, c_void_p, c_int64, c_int64),
    "rotate_and_write": (
        *_CACHE,
        *2 * (c_void_p, c_int64, c_int64),  # queries and keys, then values, with strides of a token and of a head
        *(c_void_p, c_void_p, c_float),
        *4 * (c_void_p,),
        *4 * (c_int64,),
    ),
}
_ATTENTION = {
    "attend_decodes": (*_CACHE, *3 * (c_void_p,), *3 * (c_int64,), c_void_p, *4 * (c_int64,), c_float),
    "attend_chunk": (*_CACHE, *2 * (c_void_p,), *4 * (c_int64,), c_void_p, *3 * (c_int64,), c_float),
}
_KINDS = {CACHE_DTYPES["int8"]: 1, CACHE_DTYPES["fp8"]: 2}  # others are the library's elements


def _load(name: str, dtype: torch.dtype, signatures: dict[str, tuple[Any, ...]]) -> ctypes.CDLL:
    library: ctypes.CDLL = load(Path(__file__).with_name(name), dtype)
    for function_name, arguments in signatures.items():
        function = getattr(library, function_name)
        function.argtypes, function.restype = arguments, None
    return library


class CppKernels:
    """Calls the C++ operators. A `Kernels` for contiguous tensors of one type on a CPU.

    The KV cache must be laid out as [K, S, D].

    Raises:
        NoLibraryError: they cannot be compiled here.
    """

    fallback_reason = ""

    def __init__(self, dtype: torch.dtype) -> None:
        self._library = _load("kernels.cpp", dtype, _SIGNATURES)
        self._attention = _load("attention.cpp", dtype, _ATTENTION)
        self.dtype = dtype

    def norm(self, x_TH: Tensor, term_TH: Tensor | None, weight_H: Tensor, bias_H: Tensor | None, eps: float) -> Tensor:
        """See `Kernels.norm`."""
        if term_TH is None:
            x_TH = x_TH.contiguous()
        out = torch.empty_like(x_TH)
        assert x_TH.is_contiguous()
        assert term_TH is None or term_TH.is_contiguous()
        pointers = [None if x is None else x.data_ptr() for x in (x_TH, term_TH, weight_H, bias_H, out)]
        self._library.add_and_norm(*pointers, *x_TH.shape, eps)
        return out

    def gated_silu(self, hidden_TF: Tensor) -> Tensor:
        """See `Kernels.gated_silu`."""
        T, width = hidden_TF.shape
        out = hidden_TF.new_empty(T, width // 2)
        self._library.gated_silu(hidden_TF.contiguous().data_ptr(), out.data_ptr(), T, width // 2)
        return out

    def rotate_and_write(
        self,
        qkv_TKED: Tensor,
        head_norm: HeadNorm | None,
        rope: tuple[Tensor, Tensor] | None,
        slots_T: Tensor,
        key_cache_SKD: Tensor,
        value_cache_SKD: Tensor,
        out_TKGD: Tensor | None = None,
    ) -> Tensor:
        """See `Kernels.rotate_and_write`."""
        T, K, E, D = qkv_TKED.shape
        queries = qkv_TKED.new_empty(T, K, E - 2, D) if out_TKGD is None else out_TKGD
        assert queries.is_contiguous()
        assert qkv_TKED.stride()[2:] == (D, 1)
        values_TKD, own = qkv_TKED[:, :, -1], head_norm
        weights: tuple[int | None, int | None, float] = (None, None, 0.0)
        if own is not None:
            weights = (own.query_weight.data_ptr(), own.key_weight.data_ptr(), own.eps)
        cos, sin = (None, None) if rope is None else (rope[0].data_ptr(), rope[1].data_ptr())
        self._library.rotate_and_write(
            *_cache(key_cache_SKD, value_cache_SKD),
            qkv_TKED.data_ptr(),
            *qkv_TKED.stride()[:2],
            values_TKD.data_ptr(),
            *values_TKD.stride()[:2],
            *weights,
            cos,
            sin,
            slots_T.data_ptr(),
            queries.data_ptr(),
            T,
            K,
            E - 2,
            D,
        )
        return queries

    def attend_decodes(
        self,
        q_BKGD: Tensor,
        keys_SKD: Tensor,
        values_SKD: Tensor,
        starts_B: np.ndarray,
        tables_BM: np.ndarray,
        *,
        block_size: int,
        window: int,
        out_BKGD: Tensor,
    ) -> None:
        """Compute the attention of B decodes into `out_BKGD`; it and `q_BKGD` are contiguous.

        Decode b is at position `starts_B[b]`, int64, and attends to itself and to at most `window` - 1 tokens before
        it. `tables_BM` has the blocks of each, int32.
        """
        B, K, G, D = q_BKGD.shape
        assert q_BKGD.is_contiguous()
        assert out_BKGD.is_contiguous()
        assert tables_BM.dtype == np.int32
        assert starts_B.dtype == np.int64
        assert tables_BM.flags.c_contiguous
        assert starts_B.flags.c_contiguous
        self._attention.attend_decodes(
            *_cache(keys_SKD, values_SKD),
            q_BKGD.data_ptr(),
            starts_B.ctypes.data,
            tables_BM.ctypes.data,
            tables_BM.shape[1],
            block_size,
            window,
            out_BKGD.data_ptr(),
            B,
            K,
            G,
            D,
            D**-0.5,
        )

    def attend_chunk(
        self,
        q_NKGD: Tensor,
        keys_SKD: Tensor,
        values_SKD: Tensor,
        runs: np.ndarray,
        *,
        begin: int,
        start: int,
        window: int,
        out_NKGD: Tensor,
    ) -> None:
        """Compute the attention of a chunk of N tokens into `out_NKGD`; it and `q_NKGD` are contiguous.

        The chunk's first token is at position `start`. Each attends to itself and to at most `window` - 1 tokens before
        it. `runs` hold the slots of the positions from `begin` on, each a first slot and a number of slots, int64.
        """
        N, K, G, D = q_NKGD.shape
        assert q_NKGD.is_contiguous()
        assert out_NKGD.is_contiguous()
        self._attention.attend_chunk(
            *_cache(keys_SKD, values_SKD),
            q_NKGD.data_ptr(),
            runs.ctypes.data,
            begin,
            start,
            N,
            window,
            out_NKGD.data_ptr(),
            K,
            G,
            D,
            D**-0.5,
        )


def _cache(keys_SKD: Tensor, values_SKD: Tensor) -> tuple[int, int, int, int]:
    """Return what the operators are told of a layer's cache, as `_CACHE` has it."""
    assert keys_SKD.stride()[::2] == values_SKD.stride()[::2] == (keys_SKD.shape[2], 1)
    return _KINDS.get(keys_SKD.dtype, 0), keys_SKD.data_ptr(), values_SKD.data_ptr(), keys_SKD.stride(1)
