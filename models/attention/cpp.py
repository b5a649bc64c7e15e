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
from ..kernels.cpp import CppKernels
from ..kv_cache import slot_runs
from .backend import AttentionBackend, AttentionSizes
from .sdpa import SdpaBackend, SegmentPlan, attend_chunks


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """The plan for the attention of one chunk."""

    rows: slice  # of the batch
    start: int  # position of the first token
    begin: int  # the first position that it attends to
    runs: np.ndarray  # [runs, 2] from there on: first slot, number of slots


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """The plan for the attention of all decodes."""

    rows: slice  # of the batch
    decodes: Decodes


@dataclass(frozen=True, slots=True)
class CppPlan:
    """The plan for the attention of a micro-batch."""

    num_tokens: int
    chunks: Sequence[ChunkPlan | SegmentPlan]
    decodes: DecodePlan | None


class CppBackend(AttentionBackend):
    """Reads every page of keys and values in place, once for each block of queries.

    Args:
        sdpa: computes the chunks; None: the C++ operator does.
    """

    def __init__(self, kernels: CppKernels, sizes: AttentionSizes, sdpa: SdpaBackend | None = None) -> None:
        super().__init__(sizes)
        self.sdpa = sdpa
        self.kernels = kernels
        self.window = sizes.window or sys.maxsize

    def plan(self, batch: RaggedBatch) -> CppPlan:
        """Compute for each chunk the runs of slots that its keys lie in; decodes go by their block tables."""
        chunks = self._plan_chunks(batch) if self.sdpa is None else self.sdpa.plan_chunks(batch)
        rows = slice(batch.num_chunk_tokens, batch.num_tokens)
        return CppPlan(batch.num_tokens, chunks, DecodePlan(rows, batch.decodes) if len(batch.decodes) else None)

    def _plan_chunks(self, batch: RaggedBatch) -> list[ChunkPlan]:
        chunks, row = [], 0
        for chunk in batch.chunks:
            begin = self.sizes.first_key(chunk.start)
            runs = slot_runs(chunk.blocks, begin, chunk.context, self.sizes.block_size)
            chunks.append(ChunkPlan(slice(row, row + chunk.length), chunk.start, begin, runs))
            row += chunk.length
        return chunks

    def attend(self, q_TKGD: Tensor, keys_SKD: Tensor, values_SKD: Tensor, plan: CppPlan) -> Tensor:
        """See `AttentionBackend.attend`. The operators read the cache in place, without gathering keys."""
        q_TKGD = q_TKGD.contiguous()
        out = torch.empty_like(q_TKGD)
        for chunk in plan.chunks:
            if isinstance(chunk, SegmentPlan):
                attend_chunks(q_TKGD, keys_SKD, values_SKD, [chunk], out.view(plan.num_tokens, -1))
                continue
            self.kernels.attend_chunk(
                q_TKGD[chunk.rows],
                keys_SKD,
                values_SKD,
                chunk.runs,
                begin=chunk.begin,
                start=chunk.start,
                window=self.window,
                out_NKGD=out[chunk.rows],
            )
        if plan.decodes is not None:
            rows, decodes = plan.decodes.rows, plan.decodes.decodes
            self.kernels.attend_decodes(
                q_TKGD[rows],
                keys_SKD,
                values_SKD,
                decodes.starts,
                decodes.tables,
                block_size=self.sizes.block_size,
                window=self.window,
                out_BKGD=out[rows],
            )
        return out.view(plan.num_tokens, -1)
