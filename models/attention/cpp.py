"""Attention on a CPU in C++: one call for each chunk, one for all decodes, over the pages as they lie.

SDPA computes chunks in bfloat16 with AMX, in a third of the time for 256 tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..batch import Decodes, RaggedBatch
from ..kernels.cpp import CppKernels, cache_arguments
from .backend import AttentionBackend, AttentionSizes
from .sdpa import SdpaBackend, SegmentPlan, attend_chunks


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """The plan for the attention of one chunk."""

    rows: slice  # of the batch
    start: int  # position of the first token
    table: np.ndarray  # the request's KV blocks, int32


@dataclass(frozen=True, slots=True)
class CppPlan:
    """The plan for the attention of a micro-batch, whose last rows are the decodes."""

    chunks: Sequence[ChunkPlan | SegmentPlan]
    decodes: Decodes


class CppBackend(AttentionBackend):
    """Reads every page of keys and values in place, once for each block of queries.

    Args:
        sdpa: computes the chunks; None: the C++ operator does.
    """

    def __init__(self, kernels: CppKernels, sizes: AttentionSizes, sdpa: SdpaBackend | None = None) -> None:
        super().__init__(sizes)
        self.sdpa = sdpa
        self._library = kernels.attention
        self.window = sizes.window or sys.maxsize

    def plan(self, batch: RaggedBatch) -> CppPlan:
        """Gather the block table of each chunk, unless SDPA computes it; decodes go by those that they have."""
        if self.sdpa is not None:
            return CppPlan(self.sdpa.plan_chunks(batch), batch.decodes)
        chunks = zip(batch.chunk_rows, batch.chunks, strict=True)
        return CppPlan([ChunkPlan(rows, c.start, np.array(c.blocks, np.int32)) for rows, c in chunks], batch.decodes)

    def attend(self, q_TKGD: Tensor, keys_SKD: Tensor, values_SKD: Tensor, plan: CppPlan) -> Tensor:
        """See `AttentionBackend.attend`. The operators read the cache in place, without gathering keys."""
        q_TKGD = q_TKGD.contiguous()
        out, T = torch.empty_like(q_TKGD), len(q_TKGD)
        for chunk in plan.chunks:
            if isinstance(chunk, SegmentPlan):
                attend_chunks(q_TKGD, keys_SKD, values_SKD, [chunk], out.view(T, -1))
            else:
                self.attend_chunk(q_TKGD[chunk.rows], keys_SKD, values_SKD, chunk, out[chunk.rows])
        if len(plan.decodes):
            rows = slice(T - len(plan.decodes), T)
            self.attend_decodes(q_TKGD[rows], keys_SKD, values_SKD, plan.decodes, out[rows])
        return out.view(T, -1)

    def attend_chunk(self, q: Tensor, keys_SKD: Tensor, values_SKD: Tensor, plan: ChunkPlan, out: Tensor) -> None:
        """Compute the attention of a chunk's rows, [N, K, G, D], into `out`."""
        N, K, G, D = q.shape
        cache, table = cache_arguments(keys_SKD, values_SKD), plan.table.ctypes.data
        own = (q.data_ptr(), table, self.sizes.block_size, plan.start, N, self.window, out.data_ptr())
        self._library.attend_chunk(*cache, *own, K, G, D, D**-0.5)

    def attend_decodes(self, q: Tensor, keys_SKD: Tensor, values_SKD: Tensor, decodes: Decodes, out: Tensor) -> None:
        """Compute the attention of the decodes' rows, [B, K, G, D], into `out`."""
        starts, tables = decodes.starts, decodes.tables
        assert starts.dtype == np.int64 and starts.flags.c_contiguous  # noqa: PT018
        assert tables.dtype == np.int32 and tables.flags.c_contiguous  # noqa: PT018
        cache, at = cache_arguments(keys_SKD, values_SKD), (starts.ctypes.data, tables.ctypes.data, tables.shape[1])
        own = (q.data_ptr(), *at, self.sizes.block_size, self.window, out.data_ptr())
        self._library.attend_decodes(*cache, *own, *q.shape, q.shape[3] ** -0.5)
