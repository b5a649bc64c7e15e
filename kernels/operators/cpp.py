"""The norm, activation and rotary operators in C++, for float32 and bfloat16 on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from ..attention import PagedAttention
from ..cache_rows import CPP_CACHE, cpp_cache
from ..cpp_build import compile_for
from ..cpp_library import ELEMENTS, CppFile, addresses, load
from ..head_norm import HeadNorm
from .base import Kernels

_HEADS = "pii"  # queries and keys, or values, with token and head strides
_FILE = CppFile(
    "operators",
    add_and_norm="pppppiif",
    gated_silu="ppii",
    rotate_and_write=CPP_CACHE + 2 * _HEADS + "ppf" + 4 * "p" + 4 * "i",
)


class CppKernels(Kernels):
    """Calls the C++ operators, for contiguous tensors of one type on a CPU.

    The KV cache must be laid out as [K, S, D].

    Raises:
        NoLibraryError: the operators cannot be compiled here.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        compile_for(ELEMENTS[dtype])
        self.library = load(_FILE, dtype)
        self.attention = PagedAttention(dtype)
        self.dtype = dtype

    def norm(self, x_TH: Tensor, term_TH: Tensor | None, weight_H: Tensor, bias_H: Tensor | None, eps: float) -> Tensor:
        """See `Kernels.norm`."""
        if term_TH is None:
            x_TH = x_TH.contiguous()
        out = torch.empty_like(x_TH)
        assert x_TH.is_contiguous()
        assert term_TH is None or term_TH.is_contiguous()
        self.library.add_and_norm(*addresses(x_TH, term_TH, weight_H, bias_H, out), *x_TH.shape, eps)
        return out

    def gated_silu(self, hidden_TF: Tensor) -> Tensor:
        """See `Kernels.gated_silu`."""
        T, width = hidden_TF.shape
        hidden_TF, out = hidden_TF.contiguous(), hidden_TF.new_empty(T, width // 2)
        self.library.gated_silu(hidden_TF.data_ptr(), out.data_ptr(), T, width // 2)
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
        turning = (None, None) if rope is None else (rope[0].data_ptr(), rope[1].data_ptr())
        norm = (None, None, 0.0) if own is None else (*addresses(own.query_weight, own.key_weight), own.eps)
        self.library.rotate_and_write(
            *cpp_cache(key_cache_SKD, value_cache_SKD),
            *(qkv_TKED.data_ptr(), *qkv_TKED.stride()[:2], values_TKD.data_ptr(), *values_TKD.stride()[:2]),
            *norm,
            *turning,
            *(slots_T.data_ptr(), queries.data_ptr(), T, K, E - 2, D),
        )
        return queries
