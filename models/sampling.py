"""The sampler: batch-invariant, with per-request parameters.

Each rank of the last stage samples a share of a micro-batch's rows. Semantics are vLLM's, in this order:

1. mask the tokens that structured outputs and `allowed_token_ids` do not allow; add `logit_bias`; apply the repetition
   penalty (over prompt and output), then frequency and presence penalties (over output only);
2. mask end-of-sequence and stop tokens until there are `min_tokens` output tokens, and the last token of each of
   `bad_words_ids` if the output ends with the others; structured outputs take precedence if they allow no other token;
3. at temperature 0, take the argmax (the lowest id on ties);
4. apply temperature, then `min_p`, then `top_k`, then `top_p` (the smallest set that reaches it, lowest ids first on
   ties);
5. invert the CDF, in token-id order, at one uniform number that depends on the seed and the output token's index.

Logprobs are computed after step 2. All rows of a micro-batch are sampled at once: the number of operators does not
grow with the rows, and their inputs are uploaded in one copy. Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..conf.sampling import SamplingParams
from .draws import draws_of, uniform
from .logit_edits import History, LogitEdits
from .ranking import ID_BITS, NO_TOKEN, logprobs_of, slices
from .token_masks import RowMasks
from .transfers import Download, upload


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One sampled token. The other fields are set if the request has `logprobs=k`."""

    token: int
    logprob: float | None = None
    rank: int | None = None  # among the row's logits, from 1
    top: list[tuple[int, float]] = field(default_factory=list)  # the k best tokens, each with its logprob

    @classmethod
    def of(cls, token: int, k: int, row: Sequence[Any]) -> SampledToken:
        """Make a token with its row's logprobs, as returned by `logprobs_of`, limited to the `k` best."""
        score, rank, ids, scores = row
        return cls(token, score, rank, [(i, s) for i, s in zip(ids[:k], scores, strict=False) if i != NO_TOKEN])


class Sampler:
    """Samples tokens, and records each request's past tokens if penalties or bad words need them.

    A token depends on its row of logits, on its request's parameters, seed and past tokens, and on its position. It
    never depends on other rows: weights are summed as integers, so that the order of addition does not matter.
    """

    def __init__(self, vocab_size: int) -> None:
        assert vocab_size <= 1 << ID_BITS, vocab_size
        self.vocab_size = vocab_size  # V; logits may be wider (padded to a multiple of tp)
        self._requests: dict[int, History] = {}
        self._special: set[int] = set()  # requests that need more than argmax

    def add(
        self, request: int, params: SamplingParams, seed: int, prompt_len: int, eos_token_ids: tuple[int, ...]
    ) -> None:
        """Add a request, or reset an existing one."""
        masked = sorted({i for i in (*eos_token_ids, *params.stop_token_ids) if 0 <= i < self.vocab_size})
        history = self._requests[request] = History(params, seed, prompt_len, masked)
        (self._special.discard if history.is_plain else self._special.add)(request)

    def drop(self, request: int) -> None:
        """Remove a request, if it exists."""
        self._requests.pop(request, None)
        self._special.discard(request)

    def params(self, request: int) -> SamplingParams:
        """Return the parameters of an existing request."""
        return self._requests[request].params

    @property
    def keeps_past(self) -> bool:
        """Whether any request may need its past tokens."""
        return bool(self._special)

    def feed(self, request: int, start: int, tokens: Sequence[int]) -> None:
        """Record a micro-batch's tokens, starting at position `start`. Recorded positions are skipped."""
        history = self._requests[request]
        if history.needs_past:
            history.feed(start, tokens)

    def sample(self, logits_RV: Tensor, requests: Sequence[int], positions: Sequence[int]) -> list[SampledToken]:
        """Sample one token per row, like `queue`, and wait for them."""
        return self.queue(logits_RV, requests, positions).read()

    def queue(
        self, logits_RV: Tensor, requests: Sequence[int], positions: Sequence[int], masks: RowMasks | None = None
    ) -> PendingTokens:
        """Queue the sampling of one token per row on the device, without synchronization.

        Args:
            logits_RV: float32, on any device, at least `vocab_size` wide. It is not modified.
            requests: the request of each row.
            positions: the position of each row's new token, which is the number of tokens before it.
            masks: token masks of the rows with structured outputs.

        Returns:
            The pending tokens. `NO_TOKEN` for a row with NaN or +infinity, or with only -infinity.
        """
        if not requests:
            return PendingTokens([], [])
        logits = logits_RV[:, : self.vocab_size]
        if masks is not None:
            logits = masks.apply(logits)
        if self._special.isdisjoint(requests):
            top, best = logits.max(dim=-1)
            return PendingTokens([best.where(top.abs() < math.inf, NO_TOKEN)], [])
        rows = [self._requests[r] for r in requests]
        edits, device = LogitEdits(self.vocab_size), logits.device
        edited = [r for r, (history, p) in enumerate(zip(rows, positions, strict=True)) if history.is_edited(p)]
        for r in edited:
            edits.add(r, rows[r], positions[r], None if masks is None else masks.allowed(r, self.vocab_size))
        drawn = [
            (r, history.params, uniform(history.seed, positions[r] - history.prompt_len))
            for r, history in enumerate(rows)
            if not history.params.is_greedy
        ]
        draws = draws_of(drawn, self.vocab_size, device)
        asked = [(r, history.params.logprobs) for r, history in enumerate(rows) if history.params.logprobs is not None]
        parts = slices(asked, self.vocab_size, device)
        arrays = [*edits.arrays(), *chain.from_iterable(draw.arrays for draw in draws)]
        arrays += [np.array([r for r, _ in part], dtype=np.int64) for part in parts]
        uploaded = iter(upload(arrays, device))
        if edited:
            logits = logits.contiguous() if masks is not None else logits.clone(memory_format=torch.contiguous_format)
            edits.apply(logits, uploaded)
        top, best = logits.max(dim=-1)  # NaN if the row has one
        for draw in draws:
            rows_S = next(uploaded)
            best.index_copy_(0, rows_S, draw.tokens(logits, top, rows_S, next(uploaded)))
        computed = [best.where(top.abs() < math.inf, NO_TOKEN)]
        for part in parts:
            part_S = next(uploaded)
            computed += logprobs_of(logits[part_S], best[part_S], max(n for _, n in part))
        return PendingTokens(computed, parts)


class PendingTokens:
    """Tokens that are being sampled on the device, or given tokens. `read` waits for them; it is thread-safe.

    Args:
        computed: the tokens of all rows, then the result of `logprobs_of` for each part of `logprobs`; or nothing.
        logprobs: by part, the rows and their numbers of top tokens.

    Attributes:
        tokens_R: the tokens on the device; None if no row is sampled.
    """

    def __init__(self, computed: Sequence[Tensor], logprobs: Sequence[list[tuple[int, int]]]) -> None:
        self.tokens_R = computed[0] if computed else None
        self._download = Download(computed) if computed else None
        self._logprobs = logprobs

    def read(self) -> list[SampledToken]:
        """Wait for the device, and return one token per sampled row, with the requested log-probabilities."""
        if self._download is None:
            return []
        tokens, *columns = (array.tolist() for array in self._download.read())
        sampled = list(map(SampledToken, tokens))
        for place, rows in enumerate(self._logprobs):
            for (r, k), *row in zip(rows, *columns[4 * place : 4 * place + 4], strict=True):
                if tokens[r] != NO_TOKEN:
                    sampled[r] = SampledToken.of(tokens[r], k, row)
        return sampled


def queue_logprobs(
    logits_RV: Tensor, rows: Sequence[int], tokens: Sequence[int], num_tops: Sequence[int]
) -> PendingTokens:
    """Queue the log-probabilities of given tokens, for prompt log-probabilities.

    Args:
        logits_RV: float32, V wide.
        rows: rows of the logits.
        tokens: the token of each row.
        num_tops: the number of most likely tokens to return per row.
    """
    parts = slices(list(enumerate(num_tops)), logits_RV.shape[-1], logits_RV.device)
    rows_N, tokens_N = upload([np.array(each, dtype=np.int64) for each in (rows, tokens)], logits_RV.device)
    computed = [tokens_N]
    for part in parts:
        of = slice(part[0][0], part[-1][0] + 1)
        computed += logprobs_of(logits_RV[rows_N[of]], tokens_N[of], max(n for _, n in part))
    return PendingTokens(computed, parts)
