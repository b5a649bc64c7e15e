"""Attention on a CPU in C++: one call for each chunk, one for all decodes, over the pages as they lie."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from ..batch import RaggedBatch, Segment
from ..kernels.cpp import CppKernels
from ..kv_cache import slot_runs


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
    runs: np.ndarray  # [runs, 2]: first slot, number of slots
    first_run: np.ndarray  # [B + 1] of each decode
    num_keys: np.ndarray  # [B]


@dataclass(frozen=True, slots=True)
class CppPlan:
    """The plan for the attention of a micro-batch."""

    num_tokens: int
    chunks: list[ChunkPlan]
    decodes: DecodePlan | None


class CppBackend:
    """Reads every page of keys and values in place, once for each block of queries.

    Args:
        window: a token attends to itself and the window - 1 tokens before it; None: to all tokens before it.
    """

    def __init__(self, kernels: CppKernels, *, block_size: int, window: int | None) -> None:
        self.kernels = kernels
        self.block_size = block_size
        self.window = window or sys.maxsize
        self._planned: tuple[Sequence[Segment], DecodePlan] | None = None  # the decodes that were planned last

    def plan(self, batch: RaggedBatch) -> CppPlan:
        chunks, row = [], 0
        for chunk in batch.chunks:
            runs = np.array(self._runs(chunk), dtype=np.int64)
            chunks.append(ChunkPlan(slice(row, row + chunk.length), chunk.start, self._first_key(chunk), runs))
            row += chunk.length
        return CppPlan(batch.num_tokens, chunks, self._plan_decodes(batch) if batch.decodes else None)

    def _plan_decodes(self, batch: RaggedBatch) -> DecodePlan:
        rows = slice(batch.num_chunk_tokens, batch.num_tokens)
        if self._planned is not None and self._planned[0] is batch.decodes:  # for its last layer
            return replace(self._planned[1], rows=rows)
        found = [self._runs(decode) for decode in batch.decodes]
        plan = DecodePlan(
            rows=rows,
            runs=np.array([run for runs in found for run in runs], dtype=np.int64),
            first_run=np.cumsum([0, *map(len, found)], dtype=np.int64),
            num_keys=np.array([d.context - self._first_key(d) for d in batch.decodes], dtype=np.int64),
        )
        self._planned = batch.decodes, plan
        return plan

    def _first_key(self, segment: Segment) -> int:
        """Return the first position that a segment attends to."""
        return max(0, segment.start - self.window + 1)

    def _runs(self, segment: Segment) -> list[tuple[int, int]]:
        return slot_runs(segment.blocks, self._first_key(segment), segment.context, self.block_size)

    def attend(
        self, q_TKGD: torch.Tensor, keys_SKD: torch.Tensor, values_SKD: torch.Tensor, plan: CppPlan
    ) -> torch.Tensor:
        q_TKGD = q_TKGD.contiguous()
        out = torch.empty_like(q_TKGD)
        for chunk in plan.chunks:
            self.kernels.attend_chunk(
                q_TKGD[chunk.rows], keys_SKD, values_SKD, chunk.runs, begin=chunk.begin, start=chunk.start,
                window=self.window, out_NKGD=out[chunk.rows],
            )
        if (decodes := plan.decodes) is not None:
            self.kernels.attend_decodes(
                q_TKGD[decodes.rows], keys_SKD, values_SKD, decodes.runs, decodes.first_run, decodes.num_keys,
                out[decodes.rows],
            )
        return out.view(plan.num_tokens, -1)
