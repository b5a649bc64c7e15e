"""Attention through the FlashAttention that torch is built with, on CUDA in half precision.

One call of the operator computes all chunks of a micro-batch, another one all decodes. With a single query a request it
reads the keys of a group of heads once, and divides long contexts over the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ..batch import RaggedBatch, tables_of
from ..transfers import upload
from .probe import probe

# torch's flash_api.cpp: "Paged KV cache block size must be divisible by 256".
PAGE_STEP = 256


@dataclass(frozen=True, slots=True)
class FlashPlan:
    """What the operator is given for the B requests of a call, beside queries, keys and values.

    Query i of a request's n attends to its first `used` - n + 1 + i keys.
    """

    rows: slice  # of the batch
    query_ends: torch.Tensor  # [B + 1] int32: the queries of a request end where those of the next begin
    key_starts: torch.Tensor  # [B + 1] int32: where the keys of a request begin; the last is not read
    used: torch.Tensor  # [B] int32: the keys of a request
    most_queries: int
    most_keys: int
    left: int | None = None  # keys that a query attends to before its own; None: all
    pages: torch.Tensor | None = None  # [B, M] int32: the keys of a request lie in these blocks
    gather: torch.Tensor | None = None  # [keys] int32: slots that are copied together first; None: read in place


@dataclass(frozen=True, slots=True)
class _HostPlan:
    """A plan before its numbers are on the device."""

    rows: slice
    words: np.ndarray  # int64, each two of the int32 that the device gets
    shape: tuple[int, ...]  # B requests, M blocks of the tables; M is 0 where keys are read in place without tables
    most_queries: int
    most_keys: int
    left: int | None
    total: int  # keys that are copied together; 0: none are
    block_size: int

    def on_device(self, words: torch.Tensor) -> FlashPlan:
        """Return the plan, of the copy of `words`."""
        B, M = self.shape
        query_ends, key_starts, used, firsts, tables, _ = words.view(torch.int32).split(
            [B + 1, B + 1, B, B, B * M, 2 * len(words) - 4 * B - 2 - B * M]
        )
        pages, gather = tables.view(B, M) if M else None, None
        if pages is not None and self.total:
            gather, pages = _slots(pages, firsts, key_starts[:-1], used, self.total, self.block_size), None
        return FlashPlan(
            self.rows, query_ends, key_starts, used, self.most_queries, self.most_keys, self.left, pages, gather
        )


class FlashBackend:
    """Calls FlashAttention once for all chunks and once for all decodes.

    Keys and values are read where they lie if blocks are pages of the operator, or if each request's blocks follow each
    other. Otherwise those of all requests of the call are copied together first.

    Args:
        window: a token attends to itself and the window - 1 tokens before it; None: to all tokens before it.
        paged: the operator reads block tables (`why_not_paged` says whether that runs).
    """

    def __init__(self, *, block_size: int, window: int | None, device: torch.device, paged: bool) -> None:
        self.about = ""
        self.block_size = block_size
        self.window = window
        self.device = device
        self.paged = paged

    def plan(self, batch: RaggedBatch) -> list[FlashPlan]:
        """Compute where the keys of all chunks, and those of all decodes, are read from."""
        row, calls = batch.num_chunk_tokens, []
        if batch.chunks:
            starts, lengths = np.array([(chunk.start, chunk.length) for chunk in batch.chunks], dtype=np.int64).T
            calls.append(self._lay_out(slice(0, row), starts, lengths, tables_of(batch.chunks)))
        if len(batch.decodes):
            starts, tables = batch.decodes.starts, batch.decodes.tables
            calls.append(self._lay_out(slice(row, batch.num_tokens), starts, np.ones_like(starts), tables))
        if not calls:  # no row is sampled
            return []
        return [call.on_device(w) for call, w in zip(calls, upload([c.words for c in calls], self.device), strict=True)]

    def _lay_out(self, rows: slice, starts: np.ndarray, lengths: np.ndarray, tables: np.ndarray) -> _HostPlan:
        """Plan a call for B requests: `starts` and `lengths` [B], KV blocks `tables` [B, M]."""
        contexts, size = starts + lengths, self.block_size
        firsts = np.zeros_like(starts)
        if self.window is not None and not self.paged:
            firsts = (starts - self.window + 1).clip(0)
        tables = tables[:, : -(-int(contexts.max()) // size)]
        used = contexts - firsts
        begins = np.cumsum(used) - used
        total = int(used.sum())
        if not self.paged and _are_in_a_row(tables, firsts // size, (contexts - 1) // size):
            begins, total = tables[np.arange(len(tables)), firsts // size] * size + firsts % size, 0
            tables = tables[:, :0]
        most = int(used.max())
        packed = np.concatenate(
            [[0], np.cumsum(lengths), begins, [0], used, firsts, tables.reshape(-1)],
            dtype=np.int32,
            casting="same_kind",
        )
        return _HostPlan(
            rows,
            np.resize(packed, len(packed) + len(packed) % 2).view(np.int64),
            tables.shape,
            int(lengths.max()),
            most,
            None if self.window is None or most <= self.window else self.window - 1,
            total=0 if self.paged else total,
            block_size=size,
        )

    def attend(
        self, q_TKGD: torch.Tensor, keys_SKD: torch.Tensor, values_SKD: torch.Tensor, plan: list[FlashPlan]
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        q = q_TKGD.flatten(1, 2)
        if self.paged:
            keys_SKD, values_SKD = (x.unflatten(0, (-1, self.block_size)) for x in (keys_SKD, values_SKD))
        parts = [_attention(q if len(plan) == 1 else q[each.rows], keys_SKD, values_SKD, each) for each in plan]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).flatten(1)


def _are_in_a_row(tables: np.ndarray, firsts: np.ndarray, lasts: np.ndarray) -> bool:
    """Return whether each row's blocks follow each other from place `firsts[row]` to place `lasts[row]`."""
    places = np.arange(tables.shape[1] - 1)
    counts = (places >= firsts[:, None]) & (places < lasts[:, None])
    return not (counts & (np.diff(tables, axis=1) != 1)).any()


def _slots(
    tables: torch.Tensor, firsts: torch.Tensor, begins: torch.Tensor, used: torch.Tensor, total: int, size: int
) -> torch.Tensor:
    """Return on the device the slots of `used` keys from position `firsts` on, request by request, [total] int32."""
    device = tables.device
    request = torch.repeat_interleave(torch.arange(len(used), device=device), used, output_size=total)
    position = torch.arange(total, dtype=torch.int32, device=device) + (firsts - begins)[request]
    return tables[request, position // size] * size + position % size


def _attention(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: FlashPlan) -> torch.Tensor:
    """Return what the queries [rows, heads, D] of a call attend to, of the same shape."""
    if plan.gather is not None:
        keys, values = keys.index_select(0, plan.gather), values.index_select(0, plan.gather)
    options = {} if plan.pages is None else {"block_table": plan.pages}  # which older versions of torch do not know
    attended: torch.Tensor = torch.ops.aten._flash_attention_forward(
        q,
        keys,
        values,
        plan.query_ends,
        plan.key_starts,
        plan.most_queries,
        plan.most_keys,
        0.0,  # dropout
        True,  # causal
        False,  # return_debug_mask
        window_size_left=plan.left,
        seqused_k=plan.used,
        **options,
    )[0]
    return attended


def why_not(dtype: torch.dtype, device: torch.device, head_dim: int) -> str | None:
    """Return why FlashAttention does not run here. None: it runs, and has computed small cases correctly."""
    if device.type != "cuda":
        return "needs CUDA"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"needs model.dtype=bfloat16 or float16, not {str(dtype).removeprefix('torch.')}"
    if head_dim > 256 or head_dim % 8:
        return f"needs heads of at most 256 in steps of 8, not {head_dim}"
    backend = FlashBackend(block_size=16, window=None, device=device, paged=False)
    return probe(backend, dtype, device, head_dim, block_size=16)


def why_not_paged(dtype: torch.dtype, device: torch.device, head_dim: int, block_size: int) -> str | None:
    """Return why it does not read block tables, where `why_not` is None. None: it does, and computes correctly."""
    if block_size % PAGE_STEP:
        return f"it reads pages in steps of {PAGE_STEP} tokens, and cache.block_size={block_size}"
    backend = FlashBackend(block_size=block_size, window=None, device=device, paged=True)
    return probe(backend, dtype, device, head_dim, block_size=block_size)
