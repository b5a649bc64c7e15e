"""Draws tokens at random: inverts the CDF of the tokens that min-p, top-k and top-p keep, at one number a row.

A token's weight is its probability over that of the best one: computed in float32, then an integer of 43 bits. Sums of
integers do not depend on the order of addition, so a row's token does not depend on the rows beside it, nor on how many
threads or blocks add them up. The tokens that are kept are chosen by their logits, which no rounding changes. A row
needs one number, where the Gumbel trick needs one for each token of the vocabulary.

A large vocabulary is never sorted. Top-k selects its tokens. Where there is top-p alone, weights are added up by the
upper 16 bits of the logit, and those where they reach p by the lower 16, which gives the last logit that is kept.

Shapes: S rows, V vocabulary, N tokens of a row (all, or the best k). Columns are [S, 1].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..conf.sampling import SamplingParams
from .ranking import best_tokens, order_keys, slices

_MASK64 = (1 << 64) - 1
_WEIGHT_BITS = 43  # so that an int64 holds the sum of the weights of 2**19 tokens
_DIGIT_BITS = 16
_FEW = 1 << 13  # tokens: so many are sorted
_LEAST, _MOST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


def _splitmix64(x: int) -> int:
    """Return the output of SplitMix64 (Steele, Lea and Flood 2014) at state `x`."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def uniform(seed: int, index: int) -> float:
    """Return the number in [0, 1) that picks the output token `index` of a request with `seed`."""
    return (_splitmix64(_splitmix64(seed & _MASK64) ^ index) >> 11) * 2.0**-53


@dataclass(frozen=True, slots=True)
class Draw:
    """Some rows whose tokens are drawn in the same way. The columns of their parameters are on the host.

    Attributes:
        rows: ascending.
        columns: row; temperature, min-p, top-p, number; top-k (at most V).
        most: how many tokens are selected and sorted; None: none are.
        has_min_p: any row has one.
        has_top_p: any row has one, and no tokens are selected.
    """

    rows: list[int]
    columns: list[np.ndarray]
    most: int | None
    has_min_p: bool
    has_top_p: bool

    def tokens(self, logits_RV: Tensor, top_R: Tensor, rows_S: Tensor, columns: Sequence[Tensor]) -> Tensor:
        """Return a token for each of `rows`, [S].

        Args:
            logits_RV: of all rows, float32.
            top_R: the highest logit of each. Where it is not finite, the row's token is any.
            rows_S: `rows`, on the device of the logits.
            columns: `columns` after the first, there too.
        """
        temperature, min_p, top_p, number, top_k = columns
        temperature, min_p = temperature.float()[:, None], min_p.float()[:, None] if self.has_min_p else None
        top_p, number, top = top_p[:, None], number[:, None], top_R[rows_S][:, None]
        logits_SV = logits_RV if len(self.rows) == len(logits_RV) else logits_RV[rows_S]
        if self.most is None:
            weights = _weights(logits_SV, top, temperature, min_p)
            if self.has_top_p:
                weights = _nucleus(weights, logits_SV, top_p)
            return _pick(weights, number).squeeze(-1)
        ids = best_tokens(logits_SV, self.most)
        weights = _weights(logits_SV.gather(-1, ids), top, temperature, min_p)
        weights.masked_fill_(torch.arange(ids.shape[-1], device=ids.device) >= top_k[:, None], 0)
        cdf = weights.cumsum(dim=-1)
        weights.masked_fill_(cdf - weights >= _enough(cdf, top_p), 0)
        ids, order = ids.sort(dim=-1)
        return ids.gather(-1, _pick(weights.gather(-1, order), number)).squeeze(-1)


def draws_of(
    rows: list[int], params: Sequence[SamplingParams], numbers: Sequence[float], vocab_size: int, device: torch.device
) -> list[Draw]:
    """Group rows that are not greedy by the way in which their tokens are drawn. `params` and `numbers` are theirs."""
    groups: dict[tuple[bool, bool], list[int]] = {}
    for place, p in enumerate(params):
        is_selected = 0 < p.top_k < vocab_size or (p.top_p < 1.0 and vocab_size <= _FEW)
        groups.setdefault((is_selected, p.top_p < 1.0 and not is_selected), []).append(place)
    draws = []
    for (is_selected, has_top_p), places in groups.items():
        for part in slices(places, max(vocab_size, has_top_p << _DIGIT_BITS), device):
            own = [params[i] for i in part]
            top_k = np.array([min(p.top_k or vocab_size, vocab_size) for p in own])
            reals = ([p.temperature for p in own], [p.min_p for p in own], [p.top_p for p in own])
            columns = [np.array(values, dtype=np.float64) for values in (*reals, [numbers[i] for i in part])]
            np.clip(columns[0], _LEAST, _MOST, out=columns[0])
            of_part = [rows[i] for i in part]
            draws.append(
                Draw(
                    of_part,
                    [np.array(of_part, dtype=np.int64), *columns, top_k.astype(np.int64)],
                    int(top_k.max()) if is_selected else None,
                    any(p.min_p for p in own),
                    has_top_p,
                )
            )
    return draws


def _weights(logits_SN: Tensor, top: Tensor, temperature: Tensor, min_p: Tensor | None) -> Tensor:
    share = (logits_SN - top).div_(temperature).exp_().nan_to_num_(nan=0.0)  # NaN only in rows that give no token
    if min_p is not None:
        share.mul_(share >= min_p)
    return share.mul_(2.0**_WEIGHT_BITS).long()


def _enough(cdf_SN: Tensor, top_p: Tensor) -> Tensor:
    """Return the sum of weights that `top_p` asks for."""
    total = cdf_SN[:, -1:]
    return torch.minimum((top_p * total).ceil().long(), total)


def _pick(weights_SN: Tensor, number: Tensor) -> Tensor:
    """Return the place in each row whose share of the CDF a number in [0, 1) lies in, [S, 1]."""
    cdf = weights_SN.cumsum(dim=-1)
    total = cdf[:, -1:]
    return torch.searchsorted(cdf, torch.minimum((number * total).long(), total - 1), right=True)


def _nucleus(weights_SV: Tensor, logits_SV: Tensor, top_p: Tensor) -> Tensor:
    """Return the weights, changed in place: those that `top_p` leaves out are zero.

    Kept are the tokens in descending order of logits, ascending order of ids on ties, until they have enough weight.
    """
    keys = order_keys(logits_SV).bitwise_not_()  # ascending where logits descend
    half, S = 1 << (_DIGIT_BITS - 1), len(keys)
    sums = weights_SV.new_zeros(S, 2 * half)
    upper = (keys >> _DIGIT_BITS).long().add_(half)
    cdf = sums.scatter_add_(-1, upper, weights_SV).cumsum(dim=-1)
    enough = _enough(cdf, top_p)
    digit = torch.searchsorted(cdf, enough - 1, right=True)
    enough = enough - cdf.gather(-1, digit) + sums.gather(-1, digit)
    inside = weights_SV * (upper == digit)
    cdf = sums.zero_().scatter_add_(-1, keys.bitwise_and(2 * half - 1).long(), inside).cumsum(dim=-1)
    low = torch.searchsorted(cdf, enough - 1, right=True)
    enough = enough - cdf.gather(-1, low) + sums.gather(-1, low)
    last_key = ((digit - half) * (2 * half) + low).int()
    ties = (weights_SV * (keys == last_key)).cumsum(dim=-1)
    last_id = torch.searchsorted(ties, enough - 1, right=True)
    is_tie_kept = torch.arange(keys.shape[-1], device=keys.device) <= last_id
    return weights_SV.mul_(keys < last_key + is_tie_kept)
