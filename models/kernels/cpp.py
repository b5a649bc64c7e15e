"""The small operators in C++, for float32 and bfloat16 on a CPU."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int64, c_void_p
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...parallel.cpp_library import load
from ..head_norm import HeadNorm

_SIGNATURES = {
    "rms_norm": (c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_float),
    "gated_silu": (c_void_p, c_void_p, c_int64, c_int64),
    "rotate_and_write": (
        c_void_p,
        c_int64,
        c_int64,
        c_void_p,
        c_int64,
        c_int64,
        c_void_p,
        c_void_p,
        c_void_p,
        c_void_p,
        c_void_p,
        c_int64,
        c_void_p,
        c_int64,
        c_int64,
        c_int64,
        c_int64,
    ),
    "attend_decodes": (
        c_void_p,
        c_void_p,
        c_void_p,
        c_int64,
        c_void_p,
        c_void_p,
        c_int64,
        c_int64,
        c_int64,
        c_void_p,
        c_int64,
        c_int64,
        c_int64,
        c_int64,
        c_float,
    ),
    "attend_chunk": (
        c_void_p,
        c_void_p,
        c_void_p,
        c_int64,
        c_void_p,
        c_int64,
        c_int64,
        c_int64,
        c_int64,
        c_void_p,
        c_int64,
        c_int64,
        c_int64,
        c_float,
    ),
}


class CppKernels:
    """Calls the C++ operators. A `Kernels` for contiguous tensors of one type on a CPU.

    The KV cache must be laid out as [K, S, D].

    Raises:
        NoLibraryError: they cannot be compiled here.
    """

    fallback_reason = ""

    def __init__(self, dtype: torch.dtype) -> None:
        library: ctypes.CDLL = load(Path(__file__).with_name("kernels.cpp"), dtype)
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, None
        self._library = library
        self.dtype = dtype

    def norm(self, x_TH: Tensor, term_TH: Tensor | None, weight_H: Tensor, bias_H: Tensor | None, eps: float) -> Tensor:
        """See `Kernels.norm`. The sum, and LayerNorm, are torch's."""
        if term_TH is not None:
            x_TH.add_(term_TH)
        if bias_H is not None:
            return F.layer_norm(x_TH, weight_H.shape, weight_H, bias_H, eps)
        x_TH, out = x_TH.contiguous(), torch.empty_like(x_TH)
        self._library.rms_norm(x_TH.data_ptr(), weight_H.data_ptr(), out.data_ptr(), *x_TH.shape, eps)
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
        values_TKD = qkv_TKED[:, :, -1]
        qk_TKED = qkv_TKED[:, :, :-1] if head_norm is None else head_norm(qkv_TKED[:, :, :-1])
        T, K, E, D = qk_TKED.shape
        queries = qk_TKED.new_empty(T, K, E - 1, D) if out_TKGD is None else out_TKGD
        assert queries.is_contiguous()
        assert qk_TKED.stride()[2:] == (D, 1)
        assert values_TKD.stride(2) == 1
        assert key_cache_SKD.stride()[::2] == value_cache_SKD.stride()[::2] == (D, 1)
        cos, sin = (None, None) if rope is None else (rope[0].data_ptr(), rope[1].data_ptr())
        self._library.rotate_and_write(
            qk_TKED.data_ptr(),
            *qk_TKED.stride()[:2],
            values_TKD.data_ptr(),
            *values_TKD.stride()[:2],
            cos,
            sin,
            slots_T.data_ptr(),
            key_cache_SKD.data_ptr(),
            value_cache_SKD.data_ptr(),
            key_cache_SKD.stride(1),
            queries.data_ptr(),
            T,
            K,
            E - 1,
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
        assert keys_SKD.stride()[::2] == values_SKD.stride()[::2] == (D, 1)
        assert tables_BM.dtype == np.int32
        assert starts_B.dtype == np.int64
        assert tables_BM.flags.c_contiguous
        assert starts_B.flags.c_contiguous
        self._library.attend_decodes(
            q_BKGD.data_ptr(),
            keys_SKD.data_ptr(),
            values_SKD.data_ptr(),
            keys_SKD.stride(1),
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
        assert keys_SKD.stride()[::2] == values_SKD.stride()[::2] == (D, 1)
        self._library.attend_chunk(
            q_NKGD.data_ptr(),
            keys_SKD.data_ptr(),
            values_SKD.data_ptr(),
            keys_SKD.stride(1),
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
