"""Logits processing for all rows of a micro-batch at once: allowed tokens, bias, penalties, bad words, min_tokens.

Shapes: R rows, V vocabulary. A place is a flat index into logits [R, V]: row * V + token.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from ..conf.sampling import SamplingParams
from .ranking import MASKED_LOGIT


def _ints(values: Iterable[int]) -> np.ndarray:
    return np.fromiter(values, dtype=np.int64)


class _BadWords:
    """The token sequences that an output may not contain, and the last tokens of the output so far."""

    __slots__ = ("_after", "_always", "_tail")

    def __init__(self, sequences: Sequence[tuple[int, ...]]) -> None:
        self._always = [last for *others, last in sequences if not others]
        self._after: dict[int, list[tuple[list[int], int]]] = {}  # by the token before the banned one
        for *others, last in sequences:
            if others:
                self._after.setdefault(others[-1], []).append((others, last))
        self._tail: deque[int] = deque(maxlen=max(map(len, sequences)) - 1)

    def feed(self, token: int) -> None:
        """Record an output token."""
        self._tail.append(token)

    @property
    def banned(self) -> list[int]:
        """The tokens that are not allowed next."""
        if not self._tail or self._tail[-1] not in self._after:
            return self._always
        tail = list(self._tail)
        return self._always + [last for others, last in self._after[tail[-1]] if tail[-len(others) :] == others]


class History:
    """One request's parameters, and its past tokens for penalties and bad words."""

    __slots__ = ("bad_words", "counts", "length", "masked", "params", "places", "prompt_len", "seed", "seen")

    def __init__(self, params: SamplingParams, seed: int, prompt_len: int, masked: list[int]) -> None:
        self.params = params
        self.seed = seed
        self.prompt_len = prompt_len
        self.masked = masked  # tokens masked until there are min_tokens output tokens
        self.length = 0  # positions 0 .. length - 1 are recorded
        self.seen = array("q")  # tokens of prompt and output, in the order of their first occurrence
        self.counts = array("q")  # occurrences in the output, by index in `seen`
        self.places: dict[int, int] = {}  # index in `seen` by token
        self.bad_words = _BadWords(params.bad_words_ids) if params.bad_words_ids else None

    def feed(self, start: int, tokens: Sequence[int]) -> None:
        """Record the part of `tokens` that is new. The first of them is at position `start`."""
        assert start <= self.length, f"positions {self.length} .. {start - 1} were never fed"
        for position, token in enumerate(tokens[self.length - start :], self.length):
            place = self.places.setdefault(token, len(self.seen))
            if place == len(self.seen):
                self.seen.append(token)
                self.counts.append(0)
            if position >= self.prompt_len:
                self.counts[place] += 1
                if self.bad_words is not None:
                    self.bad_words.feed(token)
        self.length = max(self.length, start + len(tokens))

    @property
    def is_plain(self) -> bool:
        """Whether sampling is plain argmax: greedy, without log-probabilities or logit edits."""
        return self.params.is_greedy and self.params.logprobs is None and not self.is_edited(self.prompt_len)

    @property
    def needs_past(self) -> bool:
        """Whether logit edits depend on past tokens."""
        return self.params.has_penalties or self.bad_words is not None

    def is_edited(self, position: int) -> bool:
        """Whether any rule changes the logits of the token at `position`."""
        return self.needs_past or self.params.edits_logits or bool(self.ends(position))

    def ends(self, position: int) -> list[int]:
        """Return the tokens masked at `position` because of `min_tokens`."""
        return self.masked if position - self.prompt_len < self.params.min_tokens else []


class LogitEdits:
    """The logit edits of a micro-batch: collected per row on the host, applied to all rows by a few operators."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._parts: list[list[np.ndarray]] = [[] for _ in range(8)]

    def add(self, row: int, history: History, position: int, structured: np.ndarray | None) -> None:
        """Collect the edits of one row of logits, for the token at `position`.

        `structured` is the mask of tokens that structured outputs allow, [V]; None: all.
        """
        params, first = history.params, row * self._vocab_size
        only, kept, biased, biases, seen, factors, amounts, masked = self._parts
        assert not history.needs_past or history.length == position, f"{history.length} tokens before {position}"
        if params.allowed_token_ids:
            only.append(_ints([row]))
            kept.append(_ints(set(params.allowed_token_ids)) + first)
        if params.logit_bias is not None:
            biased.append(_ints(params.logit_bias) + first)
            biases.append(np.fromiter(params.logit_bias.values(), dtype=np.float64))
        if params.has_penalties:
            tokens, counts = np.frombuffer(history.seen, np.int64), np.frombuffer(history.counts, np.int64)
            if params.repetition_penalty == 1.0:
                tokens, counts = tokens[counts > 0], counts[counts > 0]
            seen.append(tokens + first)
            factors.append(np.full(len(tokens), params.repetition_penalty))
            amounts.append(counts * params.frequency_penalty + (counts > 0) * params.presence_penalty)
        if structured is not None and params.allowed_token_ids:
            structured = structured & np.isin(np.arange(len(structured)), params.allowed_token_ids)
        banned = [] if history.bad_words is None else history.bad_words.banned
        for out in filter(None, (history.ends(position), banned)):
            if structured is not None:
                rest = structured.copy()
                rest[out] = False
                if not rest.any():
                    continue  # structured outputs take precedence if nothing else remains
                structured = rest
            masked.append(_ints(out) + first)

    def arrays(self) -> list[np.ndarray]:
        """Return what `apply` needs on the device."""
        return [np.concatenate(parts) for parts in self._parts if parts]

    def apply(self, logits_RV: Tensor, uploaded: Iterator[Tensor]) -> None:
        """Edit contiguous logits in place. `uploaded` yields the device copies of `arrays`."""
        flat = logits_RV.view(-1)
        only, _, biased, _, seen, _, _, masked = self._parts
        if only:
            rows, kept = next(uploaded), next(uploaded)
            values = flat[kept]
            logits_RV.index_fill_(0, rows, MASKED_LOGIT)
            flat.index_copy_(0, kept, values)
        if biased:
            flat.index_add_(0, next(uploaded), next(uploaded).float())
        if seen:
            places, factors, amounts = next(uploaded), next(uploaded).float(), next(uploaded).float()
            x = flat[places]
            flat.index_copy_(0, places, torch.where(x > 0, x / factors, x * factors).sub_(amounts))
        if masked:
            flat.index_fill_(0, next(uploaded), MASKED_LOGIT)
