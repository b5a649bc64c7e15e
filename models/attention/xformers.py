"""Attention through xformers' operators, on CUDA in half precision: one call for chunks, one for decodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..batch import RaggedBatch, Segment
from ..kv_cache import slots_of
from ..transfers import upload
from .backend import AttentionBackend
from .probe import lacks_half, probe
from .sdpa import SdpaBackend, SegmentPlan, attend_chunks


@dataclass(frozen=True, slots=True)
class PartPlan:
    """The plan for the attention of all chunks, or of all decodes, of a micro-batch.

    Where the slots of every request are consecutive, the operator reads keys and values from the cache itself and
    skips the gaps between requests. Otherwise they are copied together first.
    """

    rows: slice  # of the batch
    bias: Any  # BlockDiagonalCausalWithOffsetGappyKeysMask
    gather: Tensor | None = None  # slots to copy; None: read from the cache


@dataclass(frozen=True, slots=True)
class XformersPlan:
    """The plan for the attention of a micro-batch."""

    num_tokens: int
    parts: list[PartPlan]
    windowed: list[SegmentPlan]  # chunks, for SDPA, where one reaches past the window: no mask has gaps and a window


class XformersBackend(AttentionBackend):
    """Calls xformers once for all chunks and once for all decodes.

    Where a chunk reaches past the sliding window, all chunks of the micro-batch go through SDPA instead.

    Args:
        window: a token attends to itself and the window - 1 tokens before it; None: to all tokens before it.
    """

    def __init__(
        self, *, block_size: int, num_blocks: int, window: int | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.about = ""
        self.block_size = block_size
        self.num_slots = num_blocks * block_size
        self.window = window
        self.device = device
        self.sdpa = SdpaBackend(block_size=block_size, window=window, dtype=dtype, device=device)

    def plan(self, batch: RaggedBatch) -> XformersPlan:
        """Compute the bias of all chunks and that of all decodes; chunks go to SDPA if a context exceeds the window."""
        parts: list[PartPlan] = []
        windowed: list[SegmentPlan] = []
        if self.window is not None and any(c.context > self.window for c in batch.chunks):
            windowed = self.sdpa.plan_chunks(batch)
        elif batch.chunks:
            parts.append(self._plan_part(batch.chunks, 0))
        if len(batch.decodes):
            parts.append(self._plan_part(list(batch.decodes), batch.num_chunk_tokens))
        return XformersPlan(batch.num_tokens, parts, windowed)

    def _plan_part(self, segments: Sequence[Segment], row: int) -> PartPlan:
        from xformers.ops.fmha.attn_bias import BlockDiagonalCausalWithOffsetGappyKeysMask

        slots = []
        for segment in segments:
            first = 0 if self.window is None else max(0, segment.start - self.window + 1)
            slots.append(slots_of(segment.blocks, first, segment.context, self.block_size))
        lengths = [len(s) for s in slots]
        gather = None
        if all(isinstance(s, range) for s in slots):
            starts = [int(s[0]) for s in slots] + [self.num_slots]
        else:
            (gather,) = upload([np.concatenate([np.asarray(s, dtype=np.int64) for s in slots])], self.device)
            starts = np.cumsum([0, *lengths]).tolist()
        bias = BlockDiagonalCausalWithOffsetGappyKeysMask.from_seqlens(
            [s.length for s in segments], starts, lengths, device=self.device
        )
        return PartPlan(slice(row, row + sum(s.length for s in segments)), bias, gather)

    def attend(self, q_TKGD: Tensor, keys_SKD: Tensor, values_SKD: Tensor, plan: XformersPlan) -> Tensor:
        """See `AttentionBackend.attend`."""
        K, G, D = q_TKGD.shape[1:]
        out = q_TKGD.new_empty(plan.num_tokens, K * G * D)
        attend_chunks(q_TKGD, keys_SKD, values_SKD, plan.windowed, out)
        for part in plan.parts:
            keys = keys_SKD if part.gather is None else keys_SKD.index_select(0, part.gather)
            values = values_SKD if part.gather is None else values_SKD.index_select(0, part.gather)
            out[part.rows] = _attention(q_TKGD[part.rows], keys, values, part)
        return out


def _attention(q_TKGD: Tensor, keys_SKD: Tensor, values_SKD: Tensor, part: PartPlan) -> Tensor:
    """Compute attention, [T, K * G * D]. Keys and values are expanded to their G query heads without a copy."""
    from xformers.ops import fmha

    T, _, G, _ = q_TKGD.shape
    q = q_TKGD.contiguous()[None]
    keys, values = (x[None, :, :, None].expand(-1, -1, -1, G, -1) for x in (keys_SKD, values_SKD))
    attended: Tensor = fmha.memory_efficient_attention_forward(q, keys, values, attn_bias=part.bias, op=fmha.flash.FwOp)
    return attended.reshape(T, -1)


def why_not(dtype: torch.dtype, device: torch.device, head_dim: int) -> str | None:
    """Return why xformers does not run here. None: it runs, and has computed small cases correctly."""
    backend = XformersBackend(block_size=16, num_blocks=8, window=None, dtype=dtype, device=device)
    return lacks_half(dtype, device, head_dim) or probe(backend, dtype, device, head_dim, block_size=16)
