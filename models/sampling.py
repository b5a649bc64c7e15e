"""The sampler: chooses tokens from logits, for each request by its own parameters and independently of its batch.

Only tensor-parallel rank 0 of the last stage has a sampler. Semantics are vLLM's, in this order:

1. mask the tokens that structured outputs and `allowed_token_ids` do not allow; add `logit_bias`; apply the repetition
   penalty (over prompt and output), then frequency and presence penalties (over output only);
2. mask end-of-sequence and stop tokens until there are `min_tokens` output tokens, and the last token of each of
   `bad_words_ids` where the output ends with the others; structured outputs that allow no other token prevail;
3. at temperature 0, take the argmax (the lowest id on ties);
4. apply temperature, then `min_p`, then `top_k`, then `top_p` (the smallest set that reaches it, lowest ids first on
   ties);
5. invert the CDF, in token-id order, at one uniform number that depends on the seed and the output token's index.

Logprobs are those after step 2. Shapes: R rows, V vocabulary, S sampled (not greedy) rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ..conf.sampling import SamplingParams
from .token_masks import RowMasks
from .transfers import Download, upload

_MASK64 = (1 << 64) - 1
_ID_BITS = 19  # of a token id: bounds the vocabulary
_WEIGHT_BITS = 43  # of a weight: one int64 holds a weight and an id, and another the sum of all weights
_MAX_ELEMENTS = 1 << 22  # of a float64 work tensor; more rows are computed in slices
_MASKED_LOGIT = float("-inf")
NO_TOKEN = -1  # in place of a token, where the row's logits are not finite


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One sampled token. Where a request asks for `logprobs=k`, it has the other fields too."""

    token: int
    logprob: float | None = None
    rank: int | None = None  # among the row's logits, from 1
    top: list[tuple[int, float]] = field(default_factory=list)  # the k best tokens, each with its logprob


def _splitmix64(x: int) -> int:
    """Return the output of SplitMix64 (Steele, Lea and Flood 2014) at state `x`."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def uniform(seed: int, index: int) -> float:
    """Return the number in [0, 1) that picks the output token `index` of a request with `seed`."""
    return (_splitmix64(_splitmix64(seed & _MASK64) ^ index) >> 11) * 2.0**-53


def _ints(values: Collection[int]) -> np.ndarray:
    return np.fromiter(values, dtype=np.int64, count=len(values))


class _BadWords:
    """The sequences of tokens that an output may not hold, and the end of the output so far."""

    __slots__ = ("_after", "_always", "_tail")

    def __init__(self, sequences: Sequence[tuple[int, ...]]) -> None:
        self._always = [last for *others, last in sequences if not others]
        self._after: dict[int, list[tuple[list[int], int]]] = {}  # by the last of the tokens before the banned one
        for *others, last in sequences:
            if others:
                self._after.setdefault(others[-1], []).append((others, last))
        self._tail: deque[int] = deque(maxlen=max(map(len, sequences)) - 1)

    def feed(self, token: int) -> None:
        """Record an output token."""
        self._tail.append(token)

    @property
    def banned(self) -> list[int]:
        """The tokens that may not come next."""
        if not self._tail or self._tail[-1] not in self._after:
            return self._always
        tail = list(self._tail)
        return self._always + [last for others, last in self._after[tail[-1]] if tail[-len(others) :] == others]


class _History:
    """One request's parameters, and the past tokens that its penalties and bad words go by."""

    __slots__ = ("bad_words", "counts", "length", "masked", "params", "prompt_len", "seed", "seen")

    def __init__(self, params: SamplingParams, seed: int, prompt_len: int, masked: list[int]) -> None:
        self.params = params
        self.seed = seed
        self.prompt_len = prompt_len
        self.masked = masked  # tokens, until there are min_tokens output tokens
        self.length = 0  # positions 0 .. length - 1 are recorded
        self.seen: dict[int, None] = {}  # tokens of prompt and output, in the order of their first occurrence
        self.counts: dict[int, int] = {}  # of output tokens
        self.bad_words = _BadWords(params.bad_words_ids) if params.bad_words_ids else None

    def feed(self, start: int, tokens: Sequence[int]) -> None:
        """Record those of `tokens`, which stand from position `start` on, that are not recorded yet."""
        assert start <= self.length, f"positions {self.length} .. {start - 1} were never fed"
        for position, token in enumerate(tokens[self.length - start :], self.length):
            self.seen[token] = None
            if position >= self.prompt_len:
                self.counts[token] = self.counts.get(token, 0) + 1
                if self.bad_words is not None:
                    self.bad_words.feed(token)
        self.length = max(self.length, start + len(tokens))

    @property
    def is_plain(self) -> bool:
        """Whether each token is the argmax of its logits, and nothing is asked beside it."""
        params = self.params
        is_masked = bool(self.masked) and params.min_tokens > 0
        is_edited = self.needs_past or params.edits_logits or is_masked
        return params.is_greedy and not is_edited and params.logprobs is None

    @property
    def needs_past(self) -> bool:
        """Whether logits are edited by the tokens that came before."""
        return self.params.has_penalties or self.bad_words is not None

    def is_masked(self, position: int) -> bool:
        return bool(self.masked) and position - self.prompt_len < self.params.min_tokens

    def edit(self, logits_V: Tensor, position: int, is_structured: bool, is_over: bool) -> None:
        """Apply steps 1 and 2 to the logits of the token at `position`, in place.

        Args:
            logits_V: of one row, over the whole vocabulary.
            position: number of tokens before it, of prompt and output.
            is_structured: structured outputs have masked tokens of this row.
            is_over: they allow only tokens that end the output.
        """
        params, device = self.params, logits_V.device
        if params.allowed_token_ids:
            (ids,) = upload([_ints(sorted(set(params.allowed_token_ids)))], device)
            kept = logits_V[ids]
            logits_V.fill_(_MASKED_LOGIT).index_copy_(0, ids, kept)
        if params.logit_bias is not None:
            biases = np.fromiter(params.logit_bias.values(), dtype=np.float64)
            ids, biases_B = upload([_ints(params.logit_bias), biases], device)
            logits_V[ids] += biases_B.to(logits_V.dtype)
        assert not self.needs_past or self.length == position, f"{self.length} tokens fed before position {position}"
        if params.has_penalties:
            if params.repetition_penalty != 1.0 and self.seen:
                (ids,) = upload([_ints(self.seen)], device)
                x = logits_V[ids]
                logits_V[ids] = torch.where(x > 0, x / params.repetition_penalty, x * params.repetition_penalty)
            if self.counts and (params.frequency_penalty or params.presence_penalty):
                ids, counts = upload([_ints(self.counts), _ints(self.counts.values())], device)
                penalties = counts.to(logits_V.dtype) * params.frequency_penalty + params.presence_penalty
                logits_V[ids] -= penalties
        if self.is_masked(position) and not is_over:
            (ids,) = upload([_ints(self.masked)], device)
            logits_V.index_fill_(0, ids, _MASKED_LOGIT)
        if self.bad_words is not None and (banned := self.bad_words.banned):
            (ids,) = upload([_ints(banned)], device)
            rest = logits_V.index_fill(0, ids, _MASKED_LOGIT)
            logits_V.copy_(rest.where(rest.max() > _MASKED_LOGIT, logits_V) if is_structured else rest)


class Sampler:
    """Samples tokens, and records for each request the past tokens that its penalties need.

    A token depends on its row of logits, on its request's parameters, seed and past tokens, and on its position. It
    never depends on other rows: weights are summed as integers, so that the order of addition does not matter.
    """

    def __init__(self, vocab_size: int) -> None:
        assert vocab_size <= 1 << _ID_BITS, vocab_size
        self.vocab_size = vocab_size  # V; logits may be wider (padded to a multiple of tp)
        self._requests: dict[int, _History] = {}
        self._special: set[int] = set()  # requests for which more is to be done than to take the argmax

    def add(
        self, request: int, params: SamplingParams, seed: int, prompt_len: int, eos_token_ids: tuple[int, ...]
    ) -> None:
        """Start a request. If it is known, its past tokens are forgotten."""
        masked = sorted({i for i in (*eos_token_ids, *params.stop_token_ids) if 0 <= i < self.vocab_size})
        history = self._requests[request] = _History(params, seed, prompt_len, masked)
        (self._special.discard if history.is_plain else self._special.add)(request)

    def drop(self, request: int) -> None:
        """Forget a request, if it is known."""
        self._requests.pop(request, None)
        self._special.discard(request)

    def params(self, request: int) -> SamplingParams:
        """Return the parameters of a request that is known."""
        return self._requests[request].params

    @property
    def keeps_past(self) -> bool:
        """Whether the past tokens of any request may matter."""
        return bool(self._special)

    def feed(self, request: int, start: int, tokens: Sequence[int]) -> None:
        """Record the tokens that a micro-batch computes, from position `start` on. Known positions are skipped."""
        history = self._requests[request]
        if history.needs_past:
            history.feed(start, tokens)

    def sample(self, logits_RV: Tensor, requests: Sequence[int], positions: Sequence[int]) -> list[SampledToken]:
        """Sample one token for each row, as `queue` does, and wait for them."""
        return self.queue(logits_RV, requests, positions).read()

    def queue(
        self, logits_RV: Tensor, requests: Sequence[int], positions: Sequence[int], masks: RowMasks | None = None
    ) -> PendingTokens:
        """Queue on the device the sampling of one token for each row. The host waits for nothing.

        Args:
            logits_RV: float32, on any device, at least `vocab_size` wide. It is not modified.
            requests: the request of each row.
            positions: the position of each row's new token, which is the number of tokens before it.
            masks: of rows with structured outputs.

        Returns:
            What has the tokens. It is `NO_TOKEN` for a row that holds NaN or infinity, or no logit above -infinity.
        """
        if not requests:
            return PendingTokens(None, [])
        logits = logits_RV[:, : self.vocab_size]
        if masks is not None:
            logits = masks.apply(logits)
        if self._special.isdisjoint(requests):
            top, best = logits.max(dim=-1)
            return PendingTokens(Download([best.where(top.isfinite(), NO_TOKEN)]), [])
        rows = [self._requests[r] for r in requests]
        edited = [
            r
            for r, (h, p) in enumerate(zip(rows, positions, strict=True))
            if h.needs_past or h.params.edits_logits or h.is_masked(p)
        ]
        if edited:
            logits = logits.clone() if masks is None else logits
            for r in edited:
                is_structured = masks is not None and r in masks
                is_over = masks is not None and is_structured and not masks.has_other_than(r, rows[r].masked)
                rows[r].edit(logits[r], positions[r], is_structured, is_over)
        top, best = logits.max(dim=-1)  # NaN, if the row holds one
        drawn = [r for r, h in enumerate(rows) if not h.params.is_greedy]
        for part in slices(drawn, self.vocab_size):
            numbers = [uniform(rows[r].seed, positions[r] - rows[r].prompt_len) for r in part]
            (part_S,) = upload([_ints(part)], logits.device)
            tokens_S = _draw(logits[part_S], best[part_S], [rows[r].params for r in part], numbers)
            best.index_copy_(0, part_S, tokens_S)
        computed = [best.where(top.isfinite(), NO_TOKEN)]
        asked = [(r, h.params.logprobs) for r, h in enumerate(rows) if h.params.logprobs is not None]
        parts = []
        for part in slices([r for r, _ in asked], self.vocab_size):
            num_tops = [rows[r].params.logprobs or 0 for r in part]
            parts.append((part, num_tops))
            (part_S,) = upload([_ints(part)], logits.device)
            computed += logprobs_of(logits[part_S], best[part_S], max(num_tops))
        return PendingTokens(Download(computed), parts)


class PendingTokens:
    """Tokens that are being sampled on the device. `read` waits for them; any thread may call it.

    Args:
        download: the tokens of all rows, then what `logprobs_of` returns for each of `logprobs`.
        logprobs: the rows of each, and for each row how many of the best tokens it asks for.
    """

    def __init__(self, download: Download | None, logprobs: Sequence[tuple[list[int], list[int]]]) -> None:
        self._download = download
        self._logprobs = logprobs

    def read(self) -> list[SampledToken]:
        """Wait for the device; return a token for each row that samples, with the log-probabilities asked for."""
        if self._download is None:
            return []
        tokens, *columns = (array.tolist() for array in self._download.read())
        sampled = list(map(SampledToken, tokens))
        for place, (rows, num_tops) in enumerate(self._logprobs):
            of_rows = zip(rows, num_tops, *columns[4 * place : 4 * place + 4], strict=True)
            for r, num_top, score, rank, top_ids, top_scores in of_rows:
                if tokens[r] != NO_TOKEN:
                    top = [(i, s) for i, s in zip(top_ids[:num_top], top_scores, strict=False) if i != NO_TOKEN]
                    sampled[r] = SampledToken(tokens[r], score, rank, top)
        return sampled


def slices(rows: list[int], vocab_size: int) -> list[list[int]]:
    """Cut rows into parts of which each has room in memory at once."""
    size = max(1, _MAX_ELEMENTS // vocab_size)
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def _draw(logits_SV: Tensor, best_S: Tensor, params: list[SamplingParams], numbers: list[float]) -> Tensor:
    """Draw tokens [S] for rows that are not greedy: steps 4 and 5. `best_S` is their argmax."""
    device, full = logits_SV.device, 1 << _WEIGHT_BITS
    columns = [[p.temperature for p in params], [p.min_p for p in params], [p.top_p for p in params], numbers]
    temperature, min_p, top_p, number = (
        column.unsqueeze(-1) for column in upload([np.array(c, dtype=np.float64) for c in columns], device)
    )
    best = best_S.unsqueeze(-1)
    x = logits_SV.double()
    x = (x - x.gather(-1, best)) / temperature
    share = x.exp_().nan_to_num_(nan=0.0)  # a token's probability over that of the best token
    if any(p.min_p for p in params):
        share.masked_fill_(share < min_p, 0.0)
    weights = (share * full).long()
    weights.scatter_(-1, best, full)  # so that a row without finite logits still yields its argmax
    if any(p.top_k or p.top_p < 1.0 for p in params):
        _truncate(weights, [p.top_k for p in params], top_p)
    cdf = weights.cumsum(dim=-1)
    total = cdf[:, -1:]
    target = torch.minimum((number * total).long(), total - 1)
    return torch.searchsorted(cdf, target, right=True).squeeze(-1)


def _truncate(weights_SV: Tensor, top_k: list[int], top_p: Tensor) -> None:
    """Set to zero, in place, the weights that `top_k` and then `top_p` leave out.

    A `top_k` of 0 and a `top_p` of 1.0 leave out none. `top_p` has the shape [S, 1].
    """
    V = weights_SV.shape[-1]
    k = max(min(n or V, V) for n in top_k)
    last = (1 << _ID_BITS) - 1
    keys = (weights_SV << _ID_BITS) | (last - torch.arange(V, device=weights_SV.device))  # no ties
    keys = keys.topk(k, dim=-1).values if k < V else keys.sort(dim=-1, descending=True).values
    ordered, ids = keys >> _ID_BITS, last - (keys & last)
    ranks = torch.arange(k, device=weights_SV.device)
    (limits,) = upload([_ints([n or V for n in top_k])], weights_SV.device)
    ordered = ordered.masked_fill(ranks >= limits.unsqueeze(-1), 0)
    cdf = ordered.cumsum(dim=-1)
    enough = (top_p * cdf[:, -1:]).ceil().long()
    ordered = ordered.masked_fill((cdf - ordered >= enough) & (top_p < 1.0), 0)
    weights_SV.zero_().scatter_(-1, ids, ordered)


def logprobs_of(logits_SV: Tensor, tokens_S: Tensor, num_top: int) -> list[Tensor]:
    """Return the logprob and the rank of each row's token, and ids and logprobs of its `num_top` best, by id on ties.

    They are float64 [S], int64 [S], int64 [S, num_top] and float64 [S, num_top]. In place of the id of a token that is
    masked there is `NO_TOKEN`.
    """
    V, device = logits_SV.shape[-1], logits_SV.device
    tokens = tokens_S.unsqueeze(-1)
    chosen = logits_SV.gather(-1, tokens)
    before = torch.arange(V, device=device) < tokens
    ranks = ((logits_SV > chosen) | ((logits_SV == chosen) & before)).sum(dim=-1) + 1
    scores_SV = logits_SV.log_softmax(dim=-1).double()
    bits = (logits_SV + 0.0).view(torch.int32).long()  # of a float: ascending where positive, descending where not
    last = (1 << _ID_BITS) - 1
    keys = (torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits) << _ID_BITS) | (last - torch.arange(V, device=device))
    ids = last - (keys.topk(min(num_top, V), dim=-1).values & last)
    masked = logits_SV.gather(-1, ids) == _MASKED_LOGIT
    return [
        scores_SV.gather(-1, tokens).squeeze(-1),
        ranks,
        ids.masked_fill(masked, NO_TOKEN),
        scores_SV.gather(-1, ids),
    ]
