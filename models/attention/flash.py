"""Attention through the FlashAttention that torch is built with, on CUDA in half precision.

One call computes all chunks of a micro-batch, a second one all decodes. With one query per request, the operator reads
keys once per KV head and splits long contexts across multiprocessors.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count, takewhile
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..batch import RaggedBatch, tables_of
from ..transfers import upload
from ..work_memory import PAGE_STEP
from .backend import AttentionBackend, AttentionSizes
from .probe import lacks_half, probe, probed_sizes

_LEAST_BOUND = 1024  # keys
_CONSTANTS = 0.0, True, False  # no dropout, causal, no debug mask


@dataclass(frozen=True, slots=True)
class FlashPlan:
    """The plan of a call for B requests. Query i of a request's n attends to its first `seqused_k` - n + 1 + i keys."""

    rows: slice  # of the batch
    given: tuple[Any, ...]  # the operator's arguments after queries, keys and values
    options: dict[str, Any]
    gather: Tensor | None  # [keys] int32: slots to copy into one tensor first; None: read in place


class FlashBackend(AttentionBackend):
    """Calls FlashAttention once for all chunks and once for all decodes.

    Keys and values are read in place if the operator reads block tables, or if each request's blocks are contiguous.
    Otherwise the keys and values of all requests are copied into one tensor first.

    Args:
        paged: the operator reads block tables (`why_not_paged` checks whether it can).
    """

    def __init__(self, sizes: AttentionSizes, *, paged: bool) -> None:
        super().__init__(sizes)
        self.paged = paged

    def plan(self, batch: RaggedBatch) -> list[FlashPlan]:
        """Compute where the keys of all chunks and of all decodes are read from, with one copy to the device."""
        row, calls = batch.num_chunk_tokens, []
        if batch.chunks:
            starts, lengths = np.array([(chunk.start, chunk.length) for chunk in batch.chunks], dtype=np.int64).T
            calls.append(self._plan(slice(0, row), starts, lengths, tables_of(batch.chunks)))
        if len(batch.decodes):
            starts, tables = batch.decodes.starts, batch.decodes.tables
            calls.append(self._plan(slice(row, batch.num_tokens), starts, np.ones_like(starts), tables))
        uploaded = upload([words for words, _ in calls], self.sizes.device) if calls else []
        return [on_device(words) for words, (_, on_device) in zip(uploaded, calls, strict=True)]

    def _plan(
        self, rows: slice, starts: np.ndarray, lengths: np.ndarray, tables: np.ndarray
    ) -> tuple[np.ndarray, Callable[[Tensor], FlashPlan]]:
        """Plan a call for requests with `starts` and `lengths` [B] and KV blocks `tables` [B, M].

        Returns:
            The int32 values viewed as int64 for the upload, and a function that makes the plan from the device copy.
        """
        contexts, size, window, paged = starts + lengths, self.sizes.block_size, self.sizes.window, self.paged
        firsts = np.zeros_like(starts)  # positions of the first keys that are read
        if window is not None and not paged:
            firsts = (starts - window + 1).clip(0)
        used = contexts - firsts
        begins, most, total = np.cumsum(used) - used, int(used.max()), int(used.sum())
        tables = tables[:, : -(-int(contexts.max()) // size)]
        if not paged and _are_in_a_row(tables, firsts // size, (contexts - 1) // size):
            begins = tables[np.arange(len(tables)), firsts // size] * size + firsts % size
            tables = tables[:, :0]
        B, M = tables.shape
        packed = np.concatenate(
            [[0], np.cumsum(lengths), begins, [0], used, firsts, tables.reshape(-1)],
            dtype=np.int32,
            casting="same_kind",
        )

        def on_device(words: Tensor) -> FlashPlan:
            numbers = words.view(torch.int32)[: len(packed)]
            query_ends, key_begins, used_B, firsts_B, rest = numbers.split([B + 1, B + 1, B, B, B * M])
            left = window - 1 if window is not None and most > window else None
            options: dict[str, Any] = {"window_size_left": left, "seqused_k": used_B}
            gather = None
            if paged:
                options["block_table"] = rest.view(B, M)
            elif M:
                gather = _slots(rest.view(B, M), firsts_B, key_begins[:-1], used_B, total, size)
            return FlashPlan(rows, (query_ends, key_begins, int(lengths.max()), most, *_CONSTANTS), options, gather)

        return np.resize(packed, len(packed) + len(packed) % 2).view(np.int64), on_device

    def attend(self, q_TKGD: Tensor, keys_SKD: Tensor, values_SKD: Tensor, plan: list[FlashPlan]) -> Tensor:
        """See `AttentionBackend.attend`."""
        q = q_TKGD.flatten(1, 2)
        if self.paged:
            keys_SKD, values_SKD = (x.unflatten(0, (-1, self.sizes.block_size)) for x in (keys_SKD, values_SKD))
        if len(plan) == 1:
            return _attention(q, keys_SKD, values_SKD, plan[0])
        return torch.cat([_attention(q[each.rows], keys_SKD, values_SKD, each) for each in plan])

    def fixed_plans(self, max_rows: int, max_keys: int, scratch_block: int) -> FixedFlashPlans | None:
        """See `AttentionBackend.fixed_plans`. Needs paged reads.

        With a sliding window, the plans hold at most `window` keys, so that no window is passed to the operator. With a
        window it would read keys once per query head.
        """
        if not self.paged:
            return None
        return FixedFlashPlans(max_rows, min(max_keys, self.sizes.window or max_keys), self.sizes, scratch_block)


class FixedFlashPlans:
    """Plans for decode-only micro-batches with tensors at fixed addresses, so that CUDA graphs can capture attention.

    Sizes are constants: one query per row, and at most `bound` keys. `bounds` lists each plan's maximum number of keys
    per row, ascending.

    From the bound the operator derives the number and length of its KV splits
    (`set_params_splitkv` in torch's flash_api.cpp, `n_blocks_per_split` in FlashAttention's flash_fwd_kernel.h). A row
    with far fewer keys fills few splits, and multiprocessors idle. So each bound is four times the one before.
    """

    def __init__(self, max_rows: int, max_keys: int, sizes: AttentionSizes, scratch_block: int) -> None:
        device = sizes.device
        self.bounds = [*takewhile(lambda keys: keys < max_keys, (_LEAST_BOUND << 2 * i for i in count())), max_keys]
        self._scratch_block = scratch_block
        self._query_ends = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._used = torch.ones(max_rows, dtype=torch.int32, device=device)
        width = -(-max_keys // sizes.block_size)
        self._tables = torch.full((max_rows, width), scratch_block, dtype=torch.int32, device=device)

    def of(self, rows: int, bound: int) -> list[FlashPlan]:
        """Return the plan for `rows` rows of at most `bound` keys. It reads the data that `load` copied last."""
        ends = self._query_ends[: rows + 1]
        options = {"window_size_left": None, "seqused_k": self._used[:rows], "block_table": self._tables[:rows]}
        return [FlashPlan(slice(0, rows), (ends, ends, 1, bound, *_CONSTANTS), options, None)]

    def load(self, plan: list[FlashPlan], rows: int) -> int | None:
        """Copy a micro-batch's plan, padded to `rows` rows, and return its bound.

        None: the micro-batch is not decode-only, or exceeds the bounds. A chunk of one token counts as a decode.
        """
        _, _, max_queries, most, *_ = plan[0].given
        if len(plan) > 1 or max_queries > 1 or most > self.bounds[-1]:
            return None
        used, tables = plan[0].options["seqused_k"], plan[0].options["block_table"]
        B, M = tables.shape
        self._used[:B].copy_(used)
        self._tables[:B, :M].copy_(tables)
        if rows > B:
            self._used[B:rows].fill_(1)
            self._tables[B:rows, :1].fill_(self._scratch_block)
        return self.bounds[bisect_left(self.bounds, most)]


def _are_in_a_row(tables: np.ndarray, firsts: np.ndarray, lasts: np.ndarray) -> bool:
    """Return whether each row's blocks are contiguous from index `firsts[row]` to index `lasts[row]`."""
    places = np.arange(tables.shape[1] - 1)
    counts = (places >= firsts[:, None]) & (places < lasts[:, None])
    return not (counts & (np.diff(tables, axis=1) != 1)).any()


def _slots(tables: Tensor, firsts: Tensor, begins: Tensor, used: Tensor, total: int, size: int) -> Tensor:
    """Return the slots of each request's `used` keys from position `firsts`, on the device, [total] int32."""
    device = tables.device
    request = torch.repeat_interleave(torch.arange(len(used), device=device), used, output_size=total)
    position = torch.arange(total, dtype=torch.int32, device=device) + (firsts - begins)[request]
    return tables[request, position // size] * size + position % size


def _attention(q: Tensor, keys: Tensor, values: Tensor, plan: FlashPlan) -> Tensor:
    """Return the attention output of a call's queries [rows, heads, D], [rows, heads * D]."""
    if plan.gather is not None:
        keys, values = keys.index_select(0, plan.gather), values.index_select(0, plan.gather)
    out: Tensor = torch.ops.aten._flash_attention_forward(q, keys, values, *plan.given, **plan.options)[0]
    return out.flatten(1)


def why_not(sizes: AttentionSizes) -> str | None:
    """Return why FlashAttention does not run here. None: it runs and passed a small numerical check."""
    return lacks_half(sizes) or probe(FlashBackend(probed_sizes(sizes, 16), paged=False))


def why_not_paged(sizes: AttentionSizes) -> str | None:
    """Return why FlashAttention cannot read block tables, if `why_not` is None. None: it can, and passed the check."""
    if sizes.block_size % PAGE_STEP:
        return f"it reads pages in steps of {PAGE_STEP} tokens, and cache.block_size={sizes.block_size}"
    if "block_table" not in str(torch.ops.aten._flash_attention_forward.default._schema):
        return f"that of torch {torch.__version__} reads no pages"
    return probe(FlashBackend(probed_sizes(sizes, sizes.block_size), paged=True))
