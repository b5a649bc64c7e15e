"""Random sampling: inverts the CDF of the tokens that min-p, top-k and top-p keep, at one random number per row.

A token's weight is its probability relative to the most likely token, computed in float32 and converted to a 43-bit
integer. Integer sums do not depend on the order of addition, so sampling is batch-invariant, and independent of the
number of threads or blocks. Tokens are kept by their unrounded logits. A row needs one random number, whereas the
Gumbel trick needs one per vocabulary token.

A large vocabulary is never sorted. Top-k uses selection. So does top-p alone on a CPU, if the 512 best tokens reach p.
Otherwise a radix search finds the last logit to keep: weights are summed by the upper 16 bits of the logit, then by the
lower 16 bits within the bin that reaches p.

Shapes: S rows, V vocabulary, N tokens of a row (all, or the best k). Columns are [S, 1].
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..conf.sampling import SamplingParams
from .ranking import best_tokens, order_keys, slices
from .work_memory import DIGITS, FEW_TOKENS

_MASK64 = (1 << 64) - 1
_WEIGHT_BITS = 43  # so that the sum of the weights of 2**19 tokens fits into an int64
_DIGIT_BITS = DIGITS.bit_length() - 1
_BEST = 512  # tokens that are selected first; top-p of a trained model rarely needs more
_LEAST, _MOST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
Drawn = tuple[int, SamplingParams, float]  # a row, its parameters and its random number


def _splitmix64(x: int) -> int:
    """Return the output of SplitMix64 (Steele, Lea and Flood 2014) at state `x`."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def uniform(seed: int, index: int) -> float:
    """Return the random number in [0, 1) for the output token `index` of a request with `seed`."""
    return (_splitmix64(_splitmix64(seed & _MASK64) ^ index) >> 11) * 2.0**-53


class Draw:
    """Rows that are sampled by the same algorithm, each with its parameters and its random number in [0, 1)."""

    def __init__(self, drawn: list[Drawn], vocab_size: int, is_selected: bool) -> None:
        rows, params, numbers = zip(*drawn, strict=True)
        top_k = [min(p.top_k or vocab_size, vocab_size) for p in params]
        self._most = max(top_k) if is_selected else None  # tokens that are selected and sorted
        self._has_min_p, self._has_top_p = any(p.min_p for p in params), any(p.top_p < 1.0 for p in params)
        temperatures = [min(max(p.temperature, _LEAST), _MOST) for p in params]
        columns = (temperatures, [p.min_p for p in params], [p.top_p for p in params], numbers, top_k)
        self.arrays = [np.array(rows, dtype=np.int64), np.array(columns, dtype=np.float64).reshape(-1)]

    def tokens(self, logits_RV: Tensor, top_R: Tensor, rows_S: Tensor, columns: Tensor) -> Tensor:
        """Return one token per row, [S]; undefined if the highest logit, `top_R`, is not finite.

        `rows_S` and `columns` are `arrays` on the device of the logits.
        """
        columns = columns.view(5, -1, 1)
        temperature, min_p, *_ = columns.float()
        _, _, top_p, number, top_k = columns
        top, min_p = top_R[rows_S].unsqueeze(-1), min_p if self._has_min_p else None
        logits_SV = logits_RV if len(rows_S) == len(logits_RV) else logits_RV[rows_S]
        if self._most is None:
            weights = _weights(logits_SV, top, temperature, min_p)
            if self._has_top_p:
                weights = _nucleus(weights, logits_SV, top_p)
            return _pick(weights, number).squeeze(-1)
        ids = best_tokens(logits_SV, self._most)
        weights = _weights(logits_SV.gather(-1, ids), top, temperature, min_p)
        weights.mul_(torch.arange(ids.shape[-1], device=ids.device) < top_k)
        cdf = weights.cumsum(dim=-1)
        weights.mul_(cdf - weights < _enough(cdf[:, -1:], top_p))
        ids, order = ids.sort(dim=-1)
        return ids.gather(-1, _pick(weights.gather(-1, order), number)).squeeze(-1)


def draws_of(drawn: list[Drawn], vocab_size: int, device: torch.device) -> list[Draw]:
    """Group non-greedy rows by sampling algorithm."""
    groups: dict[tuple[bool, bool], list[Drawn]] = {}
    for each in drawn:
        has_top_p = each[1].top_p < 1.0
        is_selected = 0 < each[1].top_k < vocab_size or (has_top_p and vocab_size <= FEW_TOKENS)
        groups.setdefault((is_selected, has_top_p and not is_selected), []).append(each)
    return [
        Draw(part, vocab_size, is_selected)
        for (is_selected, by_digits), group in groups.items()
        for part in slices(group, max(vocab_size, by_digits * DIGITS), device)
    ]


def _weights(logits_SN: Tensor, top: Tensor, temperature: Tensor, min_p: Tensor | None) -> Tensor:
    share = (logits_SN - top).div_(temperature).exp_().nan_to_num_(nan=0.0)  # NaN only in rows that yield NO_TOKEN
    if min_p is not None:
        share.mul_(share >= min_p)
    return share.mul_(2.0**_WEIGHT_BITS).long()


def _enough(total: Tensor, top_p: Tensor) -> Tensor:
    """Return the sum of weights that `top_p` requires."""
    return torch.minimum((top_p * total).ceil().long(), total)


def _pick(weights_SN: Tensor, number: Tensor) -> Tensor:
    """Return the index in each row at which the CDF exceeds a number in [0, 1), [S, 1]."""
    cdf = weights_SN.cumsum(dim=-1)
    total = cdf[:, -1:]
    return torch.searchsorted(cdf, torch.minimum((number * total).long(), total - 1), right=True)


def _nucleus(weights_SV: Tensor, logits_SV: Tensor, top_p: Tensor) -> Tensor:
    """Zero the weights of tokens that `top_p` excludes, in place.

    Tokens are kept in descending order of logits, by ascending id on ties, until they reach the required weight.
    """
    enough = _enough(weights_SV.sum(dim=-1, keepdim=True), top_p)
    if weights_SV.is_cuda:  # avoids a synchronization to find the rows that need more than the best
        return _nucleus_by_digits(weights_SV, logits_SV, enough)
    ids = best_tokens(logits_SV, _BEST)
    best = weights_SV.gather(-1, ids)
    cdf = best.cumsum(dim=-1)
    rest = (cdf[:, -1] < enough[:, 0]).nonzero().squeeze(-1)
    of_rest = _nucleus_by_digits(weights_SV[rest], logits_SV[rest], enough[rest]) if len(rest) else weights_SV[:0]
    weights_SV.zero_().scatter_(-1, ids, best.mul_(cdf - best < enough))
    return weights_SV.index_copy_(0, rest, of_rest)


def _nucleus_by_digits(weights_SV: Tensor, logits_SV: Tensor, enough: Tensor) -> Tensor:
    """Like `_nucleus`, by radix search. `enough` is the result of `_enough`."""
    keys = order_keys(logits_SV).bitwise_not_()  # in descending order of logits
    half = DIGITS // 2
    sums, inside = weights_SV.new_zeros(len(keys), 2 * half), weights_SV
    last = []
    for digits in ((keys >> _DIGIT_BITS).long().add_(half), keys.bitwise_and(2 * half - 1).long()):
        cdf = sums.zero_().scatter_add_(-1, digits, inside).cumsum(dim=-1)
        last.append(torch.searchsorted(cdf, enough - 1, right=True))
        enough = enough - cdf.gather(-1, last[-1]) + sums.gather(-1, last[-1])  # of those with the last digit
        inside = inside * (digits == last[-1])
    last_key = ((last[0] - half) * (2 * half) + last[1]).int()
    last_id = torch.searchsorted(inside.cumsum(dim=-1), enough - 1, right=True)
    is_tie_kept = torch.arange(keys.shape[-1], device=keys.device) <= last_id
    return weights_SV.mul_(keys < last_key + is_tie_kept)
