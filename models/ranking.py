"""Ranks tokens by logits, the lowest id first on ties, and computes log-probabilities.

Shapes: S rows, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .work_memory import SLICE_ELEMENTS

ID_BITS = 19  # of a token id: bounds the vocabulary
MASKED_LOGIT = float("-inf")
NO_TOKEN = -1  # instead of a token: the row's logits are not finite, or the token is masked
_LAST_ID = (1 << ID_BITS) - 1
_MAX_ELEMENTS = {"cpu": 1 << 19, "cuda": SLICE_ELEMENTS}  # of a work tensor; more rows are processed in several parts


def slices(rows: list[Any], vocab_size: int, device: torch.device) -> list[list[Any]]:
    """Split rows into parts whose work memory fits: into the CPU cache, or into about 2 GB on CUDA."""
    size = max(1, _MAX_ELEMENTS[device.type] // vocab_size)
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def order_keys(logits: Tensor) -> Tensor:
    """Map float32 logits to int32 keys with the same order and ties."""
    bits = (logits + 0.0).view(torch.int32)  # + 0.0: no -0.0
    return (bits >> 31).bitwise_and_(0x7FFFFFFF).bitwise_xor_(bits)


def best_tokens(logits_SV: Tensor, k: int) -> Tensor:
    """Return the ids of the `k` tokens with the highest logits, [S, k], best first."""
    V = logits_SV.shape[-1]
    keys = order_keys(logits_SV).long().bitwise_left_shift_(ID_BITS)
    keys.bitwise_or_(torch.arange(_LAST_ID, _LAST_ID - V, -1, device=logits_SV.device))
    return keys.topk(min(k, V), dim=-1).values.bitwise_and_(_LAST_ID).neg_().add_(_LAST_ID)


def logprobs_of(logits_SV: Tensor, tokens_S: Tensor, num_top: int) -> list[Tensor]:
    """Return the logprob and rank of each row's token, and ids and logprobs of its `num_top` best, by id on ties.

    The types are float64 [S], int64 [S], int64 [S, num_top] and float64 [S, num_top]. Ids of masked tokens are
    `NO_TOKEN`.
    """
    tokens = tokens_S.unsqueeze(-1)
    chosen = logits_SV.gather(-1, tokens)
    before = torch.arange(logits_SV.shape[-1], device=logits_SV.device) < tokens
    ranks = ((logits_SV > chosen) | ((logits_SV == chosen) & before)).sum(dim=-1) + 1
    scores_SV = logits_SV.log_softmax(dim=-1)
    ids = best_tokens(logits_SV, num_top)
    masked = logits_SV.gather(-1, ids) == MASKED_LOGIT
    return [
        scores_SV.gather(-1, tokens).squeeze(-1).double(),
        ranks,
        ids.masked_fill(masked, NO_TOKEN),
        scores_SV.gather(-1, ids).double(),
    ]
