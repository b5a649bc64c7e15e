"""A workload: arrays of its requests' lengths and arrivals, from which each request is made on demand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import overload

import msgspec
import numpy as np
import numpy.typing as npt

from .prefix_ids import PrefixIds

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

# Independent streams of random numbers of one seed, so that a new rate changes neither lengths nor prompts.
LENGTH_STREAM, ARRIVAL_STREAM, PROMPT_STREAM = range(3)
_SLICE_SIZE = 4096  # requests that are converted from arrays at once


@dataclass(frozen=True, slots=True)
class DrawnRequests:
    """The requests that a workload's rule draws or its file holds, before they are cut to the context.

    `inputs` and `outputs` are numbers of tokens, 1 or more. `times` are seconds from the first request, ascending;
    None where the rule or the file has none. `prompts` are token ids; None where they are to be random. `prefixes` say
    what each prompt begins with, None for a prompt that shares nothing; None where the file does not say.
    """

    inputs: Ints
    outputs: Ints
    times: Floats | None = None
    prompts: list[list[int]] | None = None
    prefixes: list[PrefixIds | None] | None = None


class WorkItem(msgspec.Struct, frozen=True):
    """One request: token ids of its `prompt`, exactly `output_len` output tokens, `arrival` seconds from the start.

    `deadline` is the time from arrival within which the first token is due, in seconds; None: no deadline. `user` is
    "" where the workload has one user. A lower `priority` is more urgent. A prompt of zeros, as simulations have,
    begins as `prefix` says.
    """

    prompt: Sequence[int]
    output_len: int
    arrival: float
    user: str = ""
    deadline: float | None = None
    prefix: PrefixIds | None = None
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Workload(Sequence[WorkItem]):
    """Requests in the order of their arrival. A random prompt depends on the seed and the prompt's number only."""

    input_lens: Ints  # tokens
    output_lens: Ints  # tokens
    arrivals: Floats  # seconds from the start
    vocab_size: int
    seed: int = 0
    users: int = 1
    deadline: float | None = None  # seconds from a request's arrival
    num_cut: int = 0  # requests that were longer than the context and were cut to it
    entries: Ints | None = None  # which prompt each request has; None: one after the other
    prompts: list[list[int]] | None = None  # token ids, by prompt; None: random prompts
    prefixes: list[PrefixIds | None] | None = None  # what each prompt begins with; None: nothing is known of it
    priorities: tuple[int, ...] = (0,)  # that requests have in turn
    warmup: Workload | None = None  # requests that are answered before the first of these comes, and do not count

    def __len__(self) -> int:
        return len(self.input_lens)

    @overload
    def __getitem__(self, index: int) -> WorkItem: ...
    @overload
    def __getitem__(self, index: slice) -> list[WorkItem]: ...
    def __getitem__(self, index: int | slice) -> WorkItem | list[WorkItem]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        output_len, arrival = int(self.output_lens[number]), float(self.arrivals[number])
        user, priority = self._user(number), self._priority(number)
        return WorkItem(self._prompt(number), output_len, arrival, user, self.deadline, None, priority)

    def without_prompts(self) -> Iterator[WorkItem]:
        """Yield the requests with prompts of zeros, which is faster. A simulation never reads a prompt's tokens."""
        for first in range(0, len(self), _SLICE_SIZE):
            part = slice(first, first + _SLICE_SIZE)
            columns = [array[part].tolist() for array in (self.input_lens, self.output_lens, self.arrivals)]
            for number, (length, output_len, arrival) in enumerate(zip(*columns, strict=True), first):
                prefix = self.prefixes[self._entry(number)] if self.prefixes is not None else None
                user, priority = self._user(number), self._priority(number)
                yield WorkItem(bytes(length), output_len, arrival, user, self.deadline, prefix, priority)

    def part(self, taken: slice | Ints, arrivals: Floats | None = None) -> Workload:
        """Return some of the requests, by number; they arrive at `arrivals`, or as they do, the first at 0."""
        if arrivals is None:
            arrivals = self.arrivals[taken] - self.arrivals[taken][:1]
        entries = np.arange(len(self)) if self.entries is None else self.entries
        return replace(
            self,
            input_lens=self.input_lens[taken],
            output_lens=self.output_lens[taken],
            arrivals=arrivals,
            entries=entries[taken],
            warmup=None,
        )

    def _entry(self, number: int) -> int:
        return number if self.entries is None else int(self.entries[number])

    def _user(self, number: int) -> str:
        return f"user-{number % self.users}" if self.users > 1 else ""

    def _priority(self, number: int) -> int:
        return self.priorities[number % len(self.priorities)]

    def _prompt(self, number: int) -> list[int]:
        length, entry = int(self.input_lens[number]), self._entry(number)
        if self.prompts is not None:
            return self.prompts[entry][:length]
        if self.prefixes is not None and (prefix := self.prefixes[entry]) is not None:
            return prefix.tokens(length, self.vocab_size, self.seed, entry)
        generator = np.random.default_rng((self.seed, PROMPT_STREAM, entry))
        ids: list[int] = generator.integers(self.vocab_size, size=length).tolist()
        return ids
