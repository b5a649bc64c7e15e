"""Attention through xformers' operators, on CUDA in half precision: one call for chunks, one for decodes."""

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

# What xformers' Triton operator asks of pages and heads (its `not_supported_reasons`).
_PAGE_STEP = 64
_PAGED_HEAD_DIMS = (16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class PartPlan:
    """The plan for the attention of all chunks, or of all decodes, of a micro-batch.

    Where the slots of every request are consecutive, the operator reads keys and values from the cache itself and
    skips the gaps between requests. Otherwise another operator reads those of decodes by their block tables, where it
    runs, and else they are copied together first.
    """

    rows: slice  # of the batch
    bias: Any  # BlockDiagonalCausalWithOffsetGappyKeysMask, or for block tables PagedBlockDiagonal...PaddedKeysMask
    gather: torch.Tensor | None = None  # slots to copy; None: read from the cache
    is_paged: bool = False  # by block tables


@dataclass(frozen=True, slots=True)
class XformersPlan:
    """The plan for the attention of a micro-batch."""

    num_tokens: int
    parts: list[PartPlan]
    windowed: list[SegmentPlan]  # chunks, for SDPA, where one reaches past the window: no mask has gaps and a window


class XformersBackend:
    """Calls xformers once for all chunks and once for all decodes.

    Where a chunk reaches past the sliding window, all chunks of the micro-batch go through SDPA instead.

    Args:
        window: a token attends to itself and the window - 1 tokens before it; None: to all tokens before it.
        paged: decodes may be read by their block tables (`why_not_paged` says whether that runs).
    """

    def __init__(
        self,
        *,
        block_size: int,
        num_blocks: int,
        window: int | None,
        dtype: torch.dtype,
        device: torch.device,
        paged: bool = False,
    ) -> None:
        self.paged = paged
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
            decodes = list(batch.decodes)
            part = self._plan_paged(batch) if self.paged and self._is_scattered(decodes) else None
            parts.append(part or self._plan_part(decodes, batch.num_chunk_tokens))
        return XformersPlan(batch.num_tokens, parts, windowed)

    def _is_scattered(self, decodes: Sequence[Segment]) -> bool:
        """Return whether some decode's blocks do not follow each other."""
        slots = (slots_of(decode.blocks, 0, decode.context, self.block_size) for decode in decodes)
        return not all(isinstance(of_one, range) for of_one in slots)

    def _plan_paged(self, batch: RaggedBatch) -> PartPlan | None:
        """Plan the decodes by their block tables; None where the sliding window hides tokens of one."""
        from xformers.ops.fmha.attn_bias import PagedBlockDiagonalCausalWithOffsetPaddedKeysMask

        starts, tables = batch.decodes.starts, batch.decodes.tables
        if self.window is not None and int(starts.max()) >= self.window:
            return None
        most = int(starts.max()) // self.block_size + 1
        (blocks,) = upload([tables[:, :most].astype(np.int64).reshape(-1)], self.device)
        bias = PagedBlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(
            [1] * len(starts),
            (starts + 1).tolist(),
            block_tables=blocks.to(torch.int32).view(len(starts), most),
            page_size=self.block_size,
            device=self.device,
        )
        return PartPlan(slice(batch.num_chunk_tokens, batch.num_tokens), bias, is_paged=True)

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
        """See `AttentionBackend.attend`."""
        K, G, D = q_TKGD.shape[1:]
        out = q_TKGD.new_empty(plan.num_tokens, K * G * D)
        attend_chunks(q_TKGD, keys_SKD, values_SKD, plan.windowed, out)
        for part in plan.parts:
            keys = keys_SKD if part.gather is None else keys_SKD.index_select(0, part.gather)
            values = values_SKD if part.gather is None else values_SKD.index_select(0, part.gather)
            out[part.rows] = _attention(q_TKGD[part.rows], keys, values, part)
        return out


def _attention(q_TKGD: torch.Tensor, keys_SKD: torch.Tensor, values_SKD: torch.Tensor, part: PartPlan) -> torch.Tensor:
    """Compute attention, [T, K * G * D]. Keys and values are expanded to their G query heads without a copy."""
    from xformers.ops import fmha

    T, _, G, _ = q_TKGD.shape
    q = q_TKGD.contiguous()[None]
    keys, values = (x[None, :, :, None].expand(-1, -1, -1, G, -1) for x in (keys_SKD, values_SKD))
    op = fmha.triton_splitk.FwOp if part.is_paged else fmha.flash.FwOp
    attended: torch.Tensor = fmha.memory_efficient_attention_forward(q, keys, values, attn_bias=part.bias, op=op)
    return attended.reshape(T, -1)


def why_not(dtype: torch.dtype, device: torch.device, head_dim: int) -> str | None:
    """Return why xformers does not run here. None: it runs, and has computed a small case correctly."""
    if device.type != "cuda":
        return "needs CUDA"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"needs model.dtype=bfloat16 or float16, not {str(dtype).removeprefix('torch.')}"
    if head_dim > 256 or head_dim % 8:
        return f"needs heads of at most 256 in steps of 8, not {head_dim}"
    return _probe(dtype, device, head_dim, block_size=16, paged=False)


def why_not_paged(dtype: torch.dtype, device: torch.device, head_dim: int, block_size: int) -> str | None:
    """Return why decodes cannot be read by block tables, where `why_not` is None.

    None: they can be, and a small case was computed correctly.
    """
    if block_size % _PAGE_STEP:
        return f"needs cache.block_size in steps of {_PAGE_STEP}, not {block_size}"
    if head_dim not in _PAGED_HEAD_DIMS:
        return f"needs heads of {', '.join(map(str, _PAGED_HEAD_DIMS))}, not {head_dim}"
    return _probe(dtype, device, head_dim, block_size, paged=True)


def _probe(dtype: torch.dtype, device: torch.device, head_dim: int, block_size: int, *, paged: bool) -> str | None:
    """Compare xformers with SDPA in float32 on a chunk with a prefix and two decodes, out of order in the cache.

    With `paged`, the blocks of a decode are scattered too. Returns what is wrong, or None.
    """
    try:
        generator = torch.Generator(device).manual_seed(0)
        q = torch.randn(7, 2, 2, head_dim, device=device, dtype=dtype, generator=generator)
        keys, values = (
            torch.randn(6 * block_size, 2, head_dim, device=device, dtype=dtype, generator=generator) for _ in range(2)
        )
        decodes = [Segment(8, 1, [0]), Segment(block_size + 8, 1, [5, 1] if paged else [3, 4])]
        batch = RaggedBatch.of([0] * 7, [Segment(start=9, length=5, blocks=[2])], decodes, sample_rows=[])
        tested = XformersBackend(
            block_size=block_size, num_blocks=6, window=None, dtype=dtype, device=device, paged=paged
        )
        found = tested.attend(q, keys, values, tested.plan(batch)).float()
        sdpa = SdpaBackend(block_size=block_size, window=None, dtype=torch.float32, device=device)
        expected = sdpa.attend(q.float(), keys.float(), values.float(), sdpa.plan(batch))
        error = F.l1_loss(found, expected).item()
    except Exception as problem:  # imports and operators may fail in any way; whichever it is, xformers does not run
        lines = str(problem).strip().splitlines()
        return f"{type(problem).__name__}: {lines[0] if lines else 'no reason'}"
    return None if error < 0.01 else f"its result is wrong here (mean error {error:.2g})"
