"""Paged attention on a CPU in C++ (`attention.cpp`), for float32 and bfloat16: it reads keys and values in place."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .cache_rows import CPP_CACHE, cpp_cache
from .cpp_library import CppFile, load

_FILE = CppFile(
    "attention",
    attend_decodes=CPP_CACHE + "ppp" + "iii" + "p" + 4 * "i" + "f",
    attend_chunk=CPP_CACHE + "pp" + "iiii" + "p" + "iii" + "f",
)


class PagedAttention:
    """Attention of queries of a type in `ELEMENTS` over the blocks of a cache.

    Raises:
        NoLibraryError: it cannot be compiled here.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.library = load(_FILE, dtype)

    def attend_chunk(
        self,
        q_NKGD: Tensor,
        keys_SKD: Tensor,
        values_SKD: Tensor,
        table: np.ndarray,
        start: int,
        block_size: int,
        window: int,
        out_NKGD: Tensor,
    ) -> None:
        """Compute the attention of a chunk whose first token is at `start`, with its blocks `table`, int32."""
        N, K, G, D = q_NKGD.shape
        cache, at = cpp_cache(keys_SKD, values_SKD), (q_NKGD.data_ptr(), table.ctypes.data)
        self.library.attend_chunk(*cache, *at, block_size, start, N, window, out_NKGD.data_ptr(), K, G, D, D**-0.5)

    def attend_decodes(
        self,
        q_BKGD: Tensor,
        keys_SKD: Tensor,
        values_SKD: Tensor,
        starts: np.ndarray,
        tables: np.ndarray,
        block_size: int,
        window: int,
        out_BKGD: Tensor,
    ) -> None:
        """Compute the attention of decodes at positions `starts`, int64, with their blocks, [B, blocks] int32."""
        assert starts.dtype == np.int64 and starts.flags.c_contiguous  # noqa: PT018
        assert tables.dtype == np.int32 and tables.flags.c_contiguous  # noqa: PT018
        cache, at = cpp_cache(keys_SKD, values_SKD), (starts.ctypes.data, tables.ctypes.data, tables.shape[1])
        own = (q_BKGD.data_ptr(), *at, block_size, window, out_BKGD.data_ptr())
        self.library.attend_decodes(*cache, *own, *q_BKGD.shape, q_BKGD.shape[3] ** -0.5)
