"""The operator of FlashAttention by plain arithmetic, for CPUs, on which torch has none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F


@contextlib.contextmanager
def flash_on_cpu() -> Iterator[None]:
    """Give torch the operator on CPUs."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", flash_attention, "CPU")
    try:
        yield
    finally:
        library._destroy()


def flash_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    query_ends: torch.Tensor,
    key_starts: torch.Tensor,
    most_queries: int,
    most_keys: int,
    dropout: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    window_size_left: int | None = None,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, ...]:
    """Compute request by request: query i of n is aligned with the last key but n - 1 - i."""
    assert (dropout, is_causal, return_debug_mask) == (0.0, True, False)
    for numbers in (query_ends, key_starts, seqused_k, *([] if block_table is None else [block_table])):
        assert numbers.dtype == torch.int32
        assert numbers.is_contiguous()
    assert len(query_ends) == len(key_starts) == len(seqused_k) + 1
    ends, starts, used = query_ends.tolist(), key_starts.tolist(), seqused_k.tolist()
    assert ends[0] == 0
    assert ends[-1] == len(q)
    assert most_queries == max(np.diff(ends))
    assert most_keys >= max(used)
    out = torch.empty_like(q)
    for row, (begin, end, start, count) in enumerate(zip(ends[:-1], ends[1:], starts[:-1], used, strict=True)):
        if block_table is None:
            k, v = keys[start : start + count], values[start : start + count]
        else:
            assert keys.shape[1] % 256 == 0
            pages = block_table[row, : -(-count // keys.shape[1])].long()
            k, v = (x[pages].flatten(0, 1)[:count] for x in (keys, values))
        at = torch.arange(count - (end - begin), count)[:, None]
        hidden = torch.arange(count) > at
        if window_size_left is not None:
            hidden |= torch.arange(count) < at - window_size_left
        mask = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
        q_HnD, k_HmD, v_HmD = (x.transpose(0, 1).float() for x in (q[begin:end], k, v))
        attended = F.scaled_dot_product_attention(q_HnD, k_HmD, v_HmD, attn_mask=mask, enable_gqa=True)
        out[begin:end] = attended.transpose(0, 1)
    none = torch.empty(0)
    return out, none, none, none, none
