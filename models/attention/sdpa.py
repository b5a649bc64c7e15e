"""Attention through torch's scaled_dot_product_attention (SDPA), on any device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.cache_rows import read_rows
from ..batch import RaggedBatch, Segment
from ..kv_cache import slots_of
from ..transfers import upload
from .backend import AttentionBackend, AttentionSizes


@dataclass(frozen=True, slots=True)
class SegmentPlan:
    """The attention plan of one segment: a chunk or a decode."""

    rows: slice  # of the batch
    slots: slice | Tensor  # of the keys that the segment may attend to
    mask: Tensor | None = None  # additive [rows, keys]; None: every row attends to every key
    is_causal: bool = False  # the mask is a triangle, since the chunk is its request's first


@dataclass(frozen=True, slots=True)
class PaddedPlan:
    """The plan for the attention of all B decodes in one call, padded to the M keys of the longest."""

    rows: slice  # of the batch
    slots: Tensor  # [B * M]
    mask: Tensor  # additive [B, 1, 1, M]


@dataclass(frozen=True, slots=True)
class SdpaPlan:
    """The plan for the attention of a micro-batch."""

    chunks: list[SegmentPlan]
    decodes: list[SegmentPlan] | PaddedPlan


class SdpaBackend(AttentionBackend):
    """Calls SDPA once per chunk, and once per decode on a CPU or once for all decodes on a GPU.

    On a CPU, decodes read views of the cache. On a GPU, they are padded to the longest.
    """

    def plan(self, batch: RaggedBatch) -> SdpaPlan:
        """Compute the key slots of each chunk and decode, and the masks."""
        return SdpaPlan(self.plan_chunks(batch), self.plan_decodes(batch))

    def plan_chunks(self, batch: RaggedBatch) -> list[SegmentPlan]:
        """Compute the slots and the mask of each chunk of a batch, in order."""
        return [self.plan_chunk(*each) for each in zip(batch.chunks, batch.chunk_rows, strict=True)]

    def plan_chunk(self, chunk: Segment, rows: slice) -> SegmentPlan:
        """Compute the slots and the mask of the chunk at these rows of the batch."""
        first, window = self.sizes.first_key(chunk.start), self.sizes.window
        slots = self._slots(chunk, first)
        if chunk.length == 1:
            return SegmentPlan(rows, slots)
        if chunk.start == 0 and (window is None or chunk.length <= window):
            return SegmentPlan(rows, slots, is_causal=True)
        return SegmentPlan(rows, slots, chunk_mask(chunk.start, chunk.length, first, self.sizes))

    def plan_decodes(self, batch: RaggedBatch) -> list[SegmentPlan] | PaddedPlan:
        """Compute the slots of each decode, or on a GPU with several, of all decodes padded to one length."""
        if self.sizes.device.type != "cpu" and len(batch.decodes) > 1:
            return self.plan_padded(batch)
        row = batch.num_chunk_tokens
        return [
            SegmentPlan(slice(row + i, row + i + 1), self._slots(decode, self.sizes.first_key(decode.start)))
            for i, decode in enumerate(batch.decodes)
        ]

    def plan_padded(self, batch: RaggedBatch) -> PaddedPlan:
        """Plan all decodes as one call. Slots and mask are computed on the device from starts and block tables."""
        starts, tables = batch.decodes.starts, batch.decodes.tables
        B, size, device, window = len(starts), self.sizes.block_size, self.sizes.device, self.sizes.window
        firsts = np.zeros_like(starts) if window is None else (starts - window + 1).clip(0)
        M = int((starts - firsts).max()) + 1
        arrays = [starts, firsts, tables.astype(np.int64).reshape(-1)]
        starts_B, firsts_B, blocks = upload(arrays, device)
        positions_BM = firsts_B[:, None] + torch.arange(M, device=device)
        absent_BM = positions_BM > starts_B[:, None]
        # Padding reads the first key, since slots that were never written may contain NaN.
        positions_BM = torch.where(absent_BM, firsts_B[:, None], positions_BM)
        blocks_BM = blocks.view(B, -1).gather(1, positions_BM // size)
        slots_BM = blocks_BM * size + positions_BM % size
        mask_BM = torch.zeros(B, M, dtype=self.sizes.dtype, device=device).masked_fill_(absent_BM, float("-inf"))
        row = batch.num_chunk_tokens
        return PaddedPlan(slice(row, row + B), slots_BM.view(-1), mask_BM[:, None, None])

    def attend(self, q_TKGD: Tensor, keys_SKD: Tensor, values_SKD: Tensor, plan: SdpaPlan) -> Tensor:
        """See `AttentionBackend.attend`. Keys and values are gathered from the cache before each call of SDPA."""
        K, G, D = q_TKGD.shape[1:]
        out = q_TKGD.new_empty(len(q_TKGD), K * G * D)
        attend_chunks(q_TKGD, keys_SKD, values_SKD, plan.chunks, out)
        attend_decodes(q_TKGD, keys_SKD, values_SKD, plan.decodes, out)
        return out

    def _slots(self, segment: Segment, first: int) -> slice | Tensor:
        slots = slots_of(segment.blocks, first, segment.context, self.sizes.block_size)
        if isinstance(slots, range):
            return slice(slots.start, slots.stop)
        return upload([slots], self.sizes.device)[0]


def chunk_mask(start: int, length: int, first: int, sizes: AttentionSizes) -> Tensor:
    """Return the additive mask of a chunk, [length, start + length - first], on the device (paper Figure 6).

    Row i is the query at position start + i. Column j is the key at position first + j. A query attends to itself and
    the tokens before it, to at most `window` tokens in total.
    """
    window, dtype, device = sizes.window, sizes.dtype, sizes.device
    queries = torch.arange(start, start + length, device=device)[:, None]
    keys = torch.arange(first, start + length, device=device)
    hidden = keys > queries
    if window is not None:
        hidden |= keys <= queries - window
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))


def read_slots(cache_SKD: Tensor, slots: slice | Tensor, q_TKGD: Tensor) -> Tensor:
    """Return the keys or values at `slots`, [1, K, keys, D], as `read_rows` does, for queries `q_TKGD`."""
    return read_rows(cache_SKD, slots, q_TKGD.shape[3], q_TKGD.dtype).transpose(0, 1).unsqueeze(0)


def read_padded(cache_SKD: Tensor, plan: PaddedPlan, q_TKGD: Tensor) -> Tensor:
    """Return the keys or values of a plan, [B, K, M, D], as `read_rows` does, for queries `q_TKGD`."""
    K, D = q_TKGD.shape[1], q_TKGD.shape[3]
    rows = read_rows(cache_SKD, plan.slots, D, q_TKGD.dtype)
    return rows.view(plan.rows.stop - plan.rows.start, -1, K, D).transpose(1, 2)


def attend_chunks(q_TKGD: Tensor, keys_SKD: Tensor, values_SKD: Tensor, plans: list[SegmentPlan], out: Tensor) -> None:
    """Compute the attention of each chunk into its rows of `out`, [T, K * G * D]."""
    K, G, D = q_TKGD.shape[1:]
    for plan in plans:
        q = q_TKGD[plan.rows].reshape(-1, K * G, D).transpose(0, 1).unsqueeze(0)
        attended = F.scaled_dot_product_attention(
            q,
            read_slots(keys_SKD, plan.slots, q_TKGD),
            read_slots(values_SKD, plan.slots, q_TKGD),
            attn_mask=plan.mask,
            is_causal=plan.is_causal,
            enable_gqa=G > 1,
        )
        out[plan.rows].view(-1, K * G, D).copy_(attended[0].transpose(0, 1))


def attend_decodes(
    q_TKGD: Tensor, keys_SKD: Tensor, values_SKD: Tensor, plan: list[SegmentPlan] | PaddedPlan, out: Tensor
) -> None:
    """Compute the attention of each decode into its row of `out`, [T, K * G * D].

    The G queries of a KV head attend to the same keys, so they are passed as G rows of one head.
    """
    K, G, D = q_TKGD.shape[1:]
    if isinstance(plan, PaddedPlan):
        keys, values = (read_padded(cache, plan, q_TKGD) for cache in (keys_SKD, values_SKD))
        attended = F.scaled_dot_product_attention(q_TKGD[plan.rows], keys, values, attn_mask=plan.mask)
        out[plan.rows] = attended.flatten(1)
        return
    for decode in plan:
        attended = F.scaled_dot_product_attention(
            q_TKGD[decode.rows],
            read_slots(keys_SKD, decode.slots, q_TKGD),
            read_slots(values_SKD, decode.slots, q_TKGD),
        )
        out[decode.rows].view(1, K, G, D).copy_(attended)
