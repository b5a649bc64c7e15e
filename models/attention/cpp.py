"""Paged attention on a CPU in C++: one call per chunk, one for all decodes, reading pages in place.

With AMX, SDPA computes bfloat16 chunks instead: it takes a third of the time for 256 tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...kernels.attention import PagedAttention
from ..batch import Decodes, RaggedBatch
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
    """The attention plan of a micro-batch. Its last rows are the decodes."""

    chunks: Sequence[ChunkPlan | SegmentPlan]
    decodes: Decodes


class CppBackend(AttentionBackend):
    """Paged attention in C++, which reads the KV cache in place.

    Args:
        sdpa: computes prefill chunks; None: C++ computes them too.
    """

    def __init__(self, attention: PagedAttention, sizes: AttentionSizes, sdpa: SdpaBackend | None = None) -> None:
        super().__init__(sizes)
        self.sdpa = sdpa
        self._attention = attention
        self.window = sizes.window or sys.maxsize

    def plan(self, batch: RaggedBatch) -> CppPlan:
        """Gather each chunk's block table, or its SDPA plan; decodes already have block tables."""
        if self.sdpa is not None:
            return CppPlan(self.sdpa.plan_chunks(batch), batch.decodes)
        chunks = zip(batch.chunk_rows, batch.chunks, strict=True)
        return CppPlan([ChunkPlan(rows, c.start, np.array(c.blocks, np.int32)) for rows, c in chunks], batch.decodes)

    def attend(self, q_TKGD: Tensor, keys_SKD: Tensor, values_SKD: Tensor, plan: CppPlan) -> Tensor:
        """See `AttentionBackend.attend`. The C++ operators read the cache in place, without gathering keys."""
        q_TKGD = q_TKGD.contiguous()
        out, T = torch.empty_like(q_TKGD), len(q_TKGD)
        sizes = self.sizes.block_size, self.window
        for chunk in plan.chunks:
            if isinstance(chunk, SegmentPlan):
                attend_chunks(q_TKGD, keys_SKD, values_SKD, [chunk], out.view(T, -1))
            else:
                own = (q_TKGD[chunk.rows], keys_SKD, values_SKD, chunk.table, chunk.start)
                self._attention.attend_chunk(*own, *sizes, out[chunk.rows])
        if (count := len(plan.decodes)) > 0:
            tables = (keys_SKD, values_SKD, plan.decodes.starts, plan.decodes.tables)
            self._attention.attend_decodes(q_TKGD[T - count :], *tables, *sizes, out[T - count :])
        return out.view(T, -1)
