"""Clients that keep streams open and compare each output with the output without faults.

If two tokens are almost equally likely, a different summation order may select the other one, and the order depends on
the rest of the micro-batch. `is_rounding` distinguishes such a difference from a wrong token.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
import time
import urllib.request
from dataclasses import dataclass, field

import numpy as np

from gapless.models.draws import uniform

from .server import Server
from .streams import Stream, note, read, request_of

_FIRST_TOKEN, _LAST_TOKEN = 5, 300  # of prompts; in every vocabulary
_TEMPERATURE, _TOP_K = 0.8, 20
_TIE = 1e-4  # in log-probability, or in probability if sampled; float32 rounding is a hundredth of it
_ANSWER_S = 30


@dataclass(frozen=True)
class Question:
    """A request for `tokens` tokens; greedy if `seed` is None."""

    prompt: list[int]
    tokens: int
    seed: int | None

    @property
    def request(self) -> bytes:
        sampling = {} if self.seed is None else {"temperature": _TEMPERATURE, "top_k": _TOP_K, "seed": self.seed}
        return request_of(self.prompt, self.tokens, **sampling)


def questions(count: int, prompt: int, output: int) -> list[Question]:
    """Draw `count` requests; every other one is sampled with its own seed. Lengths vary by half."""
    rng = np.random.default_rng(0)
    found = []
    for number in range(count):
        lengths = rng.integers((prompt // 2, output // 2), (prompt * 3 // 2 + 1, output * 3 // 2 + 1)).tolist()
        ids = rng.integers(_FIRST_TOKEN, _LAST_TOKEN, lengths[0]).tolist()
        found.append(Question(ids, lengths[1], number if number % 2 else None))
    return found


def is_rounding(server: Server, question: Question, expected: list[int], found: list[int]) -> bool:
    """Return whether the first token of `found` that differs from `expected` ties with it within rounding."""
    place = next(at for at, (one, other) in enumerate(zip(expected, found, strict=True)) if one != other)
    body = {"prompt": question.prompt + expected[: place + 1], "max_tokens": 1, "prompt_logprobs": _TOP_K + 1}
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:
        last = json.load(answer)["choices"][0]["prompt_logprobs"][-1]
    logprobs = {int(token): entry["logprob"] for token, entry in last.items()}
    pair = expected[place], found[place]
    if not logprobs.keys() >= set(pair):
        return False
    if question.seed is None:
        return bool(abs(logprobs[pair[0]] - logprobs[pair[1]]) < _TIE)
    ranked = sorted(logprobs, key=logprobs.__getitem__, reverse=True)
    if logprobs[ranked[_TOP_K - 1]] - logprobs[ranked[_TOP_K]] < _TIE:  # rounding decides which is in the top k
        return True
    likely = sorted(ranked[:_TOP_K])
    weights = [math.exp(logprobs[token] / _TEMPERATURE) for token in likely]
    first, second = sorted(map(likely.index, pair))
    edges = list(itertools.accumulate(weights))
    number = uniform(question.seed, place)
    return all(abs(edge / edges[-1] - number) < _TIE for edge in edges[first:second])


@dataclass
class Outcome:
    """Outcomes of the requests. Times are `time.monotonic()`."""

    done: int = 0
    lost: list[str] = field(default_factory=list)  # reasons of those that ended early or with an error
    doubled: int = 0  # got more tokens than requested
    others: list[tuple[Question, list[int], list[int]]] = field(default_factory=list)  # question, expected, found
    token_times: list[float] = field(default_factory=list)


class Clients:
    """Clients that each send random requests of `all_questions` back to back until `end`."""

    def __init__(self, server: Server, all_questions: list[Question]) -> None:
        self._server = server
        self.questions = all_questions
        self.expected: list[list[int]] = []
        self._is_ending = False
        self.outcome = Outcome()

    async def learn(self) -> None:
        """Send each question once, and keep the outputs as the expected ones.

        Raises:
            SystemExit: a request failed.
        """
        streams = await asyncio.gather(*map(self._ask, self.questions))
        for stream in streams:
            if stream.error:
                raise SystemExit(f"a request failed without any fault: {stream.error[:500]}")
        self.expected = [stream.token_ids for stream in streams]

    def end(self) -> None:
        """Stop sending. `run` returns once the last streams have ended."""
        self._is_ending = True

    async def run(self, clients: int) -> None:
        await asyncio.gather(*(self._run(random.Random(seed)) for seed in range(clients)))

    async def _run(self, rng: random.Random) -> None:
        while not self._is_ending:
            place = rng.randrange(len(self.questions))
            self._check(await self._ask(self.questions[place]), self.questions[place], self.expected[place])

    async def _ask(self, question: Question) -> Stream:
        stream, began = Stream(time.monotonic()), time.perf_counter()
        note(stream, await read(self._server, question.request, stream, began), question.tokens)
        return stream

    def _check(self, stream: Stream, question: Question, expected: list[int]) -> None:
        outcome = self.outcome
        outcome.done += 1
        outcome.token_times += [stream.due + seconds for seconds in stream.token_times]
        if len(stream.token_ids) > question.tokens:
            outcome.doubled += 1
        elif stream.error:
            outcome.lost.append(stream.error[:300])
        elif stream.token_ids != expected:
            outcome.others.append((question, expected, stream.token_ids))

    def split_others(self) -> tuple[int, int]:
        """Return how many outputs differ from the expected ones by rounding, and how many are wrong.

        Queries the server.
        """
        ties = sum(is_rounding(self._server, *other) for other in self.outcome.others)
        return ties, len(self.outcome.others) - ties
