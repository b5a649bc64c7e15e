"""Attention through xformers' flash operator, on CUDA in half precision: one call for chunks, one for decodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from ..batch import RaggedBatch, Segment
from ..kv_cache import slots_of
from ..transfers import upload
from .sdpa import SdpaBackend, SegmentPlan, attend_chunks


@dataclass(frozen=True, slots=True)
class PartPlan:
    """The plan for the attention of all chunks, or of all decodes, of a micro-batch.

    Where the slots of every request are consecutive, the operator reads keys and values from the cache itself and
    skips the gaps between requests. Otherwise they are copied together first.
    """

    rows: slice  # of the batch
    bias: Any  # BlockDiagonalCausalWithOffsetGappyKeysMask
    gather: torch.Tensor | None  # slots to copy; None: read from the cache


@dataclass(frozen=True, slots=True)
class XformersPlan:
    """The plan for the attention of a micro-batch."""

    num_tokens: int
    parts: list[PartPlan]
    windowed: list[SegmentPlan]  # chunks, for SDPA, where one reaches past the window: no mask has gaps and a window


class XformersBackend:
    """Calls xformers' flash operator once for all chunks and once for all decodes.

    Where a chunk reaches past the sliding window, all chunks of the micro-batch go through SDPA instead.

    Args:
        window: a token attends to itself and the window - 1 tokens before it; None: to all tokens before it.
    """

    def __init__(
        self, *, block_size: int, num_blocks: int, window: int | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.block_size = block_size
        self.num_slots = num_blocks * block_size
        self.window = window
        self.device = device
        self.sdpa = SdpaBackend(block_size=block_size, window=window, dtype=dtype, device=device)

    def plan(self, batch: RaggedBatch) -> XformersPlan:
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

    def attend(
        self, q_TKGD: torch.Tensor, keys_SKD: torch.Tensor, values_SKD: torch.Tensor, plan: XformersPlan
    ) -> torch.Tensor:
        K, G, D = q_TKGD.shape[1:]
        out = q_TKGD.new_empty(plan.num_tokens, K * G * D)
        attend_chunks(q_TKGD, keys_SKD, values_SKD, plan.windowed, out)
        for part in plan.parts:
            keys = keys_SKD if part.gather is None else keys_SKD.index_select(0, part.gather)
            values = values_SKD if part.gather is None else values_SKD.index_select(0, part.gather)
            out[part.rows] = _attention(q_TKGD[part.rows], keys, values, part.bias)
        return out


def _attention(q_TKGD: torch.Tensor, keys_SKD: torch.Tensor, values_SKD: torch.Tensor, bias: Any) -> torch.Tensor:
    """Compute attention, [T, K * G * D]. Keys and values are expanded to their G query heads without a copy."""
    from xformers.ops import fmha

    T, _, G, _ = q_TKGD.shape
    q = q_TKGD.contiguous()[None]
    keys, values = (x[None, :, :, None].expand(-1, -1, -1, G, -1) for x in (keys_SKD, values_SKD))
    attended = fmha.memory_efficient_attention_forward(q, keys, values, attn_bias=bias, op=fmha.flash.FwOp)
    return attended.reshape(T, -1)


def why_not(dtype: torch.dtype, device: torch.device, head_dim: int) -> str | None:
    """Return why xformers does not run here. None: it runs, and has computed a small case correctly."""
    if device.type != "cuda":
        return "needs CUDA"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"needs model.dtype=bfloat16 or float16, not {str(dtype).removeprefix('torch.')}"
    if head_dim > 256 or head_dim % 8:
        return f"needs heads of at most 256 in steps of 8, not {head_dim}"
    try:
        return _probe(dtype, device, head_dim)
    except Exception as error:  # imports and operators may fail in any way; whichever it is, xformers does not run
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no reason'}"


def _probe(dtype: torch.dtype, device: torch.device, head_dim: int) -> str | None:
    """Compare xformers with SDPA in float32 on a chunk with a prefix and a decode, stored out of order in the cache.

    Returns what is wrong, or None.
    """
    generator = torch.Generator(device).manual_seed(0)
    q = torch.randn(6, 2, 2, head_dim, device=device, dtype=dtype, generator=generator)
    keys, values = (
        torch.randn(64, 2, head_dim, device=device, dtype=dtype, generator=generator) for _ in range(2)
    )
    batch = RaggedBatch.of(
        token_ids=[0] * 6, chunks=[Segment(start=9, length=5, blocks=[2])], decodes=[Segment(8, 1, [0])],
        sample_rows=[],
    )
    tested = XformersBackend(block_size=16, num_blocks=4, window=None, dtype=dtype, device=device)
    found = tested.attend(q, keys, values, tested.plan(batch)).float()
    sdpa = SdpaBackend(block_size=16, window=None, dtype=torch.float32, device=device)
    expected = sdpa.attend(q.float(), keys.float(), values.float(), sdpa.plan(batch))
    error = F.l1_loss(found, expected).item()
    return None if error < 0.01 else f"its result is wrong here (mean error {error:.2g})"
