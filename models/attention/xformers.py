"""Attention through xformers' operators, on CUDA in half precision: one call for chunks, one for decodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from ..batch import RaggedBatch, Segment
from ..kv_cache import slots_of
from ..transfers import upload
from .backend import AttentionBackend, AttentionSizes
from .probe import lacks_half, probe, probed_sizes
from .sdpa import SdpaBackend, SegmentPlan, attend_chunks


@dataclass(frozen=True, slots=True)
class PartPlan:
    """The plan for the attention of all chunks, or of all decodes, of a micro-batch.

    If every request's slots are consecutive, the operator reads keys and values from the cache in place and skips the
    gaps between requests. Otherwise they are copied into one tensor first.
    """

    rows: slice  # of the batch
    bias: Any  # BlockDiagonalCausalWithOffsetGappyKeysMask
    gather: Tensor | None = None  # slots to copy; None: read from the cache


@dataclass(frozen=True, slots=True)
class XformersPlan:
    """The plan for the attention of a micro-batch."""

    parts: list[PartPlan]
    windowed: list[SegmentPlan]  # all chunks, if one exceeds the window: no xformers mask has both gaps and a window


class XformersBackend(AttentionBackend):
    """Calls xformers once for all chunks and once for all decodes.

    If a chunk's context exceeds the sliding window, all chunks of the micro-batch go through SDPA instead.
    """

    def __init__(self, sizes: AttentionSizes) -> None:
        super().__init__(sizes)
        self.sdpa = SdpaBackend(sizes)

    def plan(self, batch: RaggedBatch) -> XformersPlan:
        """Compute one bias for all chunks and one for all decodes; chunks use SDPA if a context exceeds the window."""
        parts: list[PartPlan] = []
        windowed: list[SegmentPlan] = []
        window = self.sizes.window
        if window is not None and any(c.context > window for c in batch.chunks):
            windowed = self.sdpa.plan_chunks(batch)
        elif batch.chunks:
            parts.append(self._plan_part(batch.chunks, 0))
        if len(batch.decodes):
            parts.append(self._plan_part(list(batch.decodes), batch.num_chunk_tokens))
        return XformersPlan(parts, windowed)

    def _plan_part(self, segments: Sequence[Segment], row: int) -> PartPlan:
        from xformers.ops.fmha.attn_bias import BlockDiagonalCausalWithOffsetGappyKeysMask

        size, device = self.sizes.block_size, self.sizes.device
        slots = [slots_of(s.blocks, self.sizes.first_key(s.start), s.context, size) for s in segments]
        lengths = [len(s) for s in slots]
        gather = None
        if all(isinstance(s, range) for s in slots):
            starts = [int(s[0]) for s in slots] + [self.sizes.num_blocks * size]
        else:
            (gather,) = upload([np.concatenate([np.asarray(s, dtype=np.int64) for s in slots])], device)
            starts = np.cumsum([0, *lengths]).tolist()
        bias = BlockDiagonalCausalWithOffsetGappyKeysMask.from_seqlens(
            [s.length for s in segments], starts, lengths, device=device
        )
        return PartPlan(slice(row, row + sum(s.length for s in segments)), bias, gather)

    def attend(self, q_TKGD: Tensor, keys_SKD: Tensor, values_SKD: Tensor, plan: XformersPlan) -> Tensor:
        """See `AttentionBackend.attend`."""
        K, G, D = q_TKGD.shape[1:]
        out = q_TKGD.new_empty(len(q_TKGD), K * G * D)
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


def why_not(sizes: AttentionSizes) -> str | None:
    """Return why xformers does not run here. None: it runs and passed a small numerical check."""
    return lacks_half(sizes) or probe(XformersBackend(probed_sizes(sizes, 16)))
