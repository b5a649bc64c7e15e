"""A workload: arrays of its requests' lengths and arrivals, from which each request is made on demand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import overload

import numpy as np
import numpy.typing as npt

from ...core.prefix_ids import PrefixIds
from ...core.work_item import WorkItem

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

# Independent random streams of one seed, so that a new rate changes neither lengths nor prompts.
LENGTH_STREAM, ARRIVAL_STREAM, PROMPT_STREAM = range(3)
_SLICE_SIZE = 4096  # requests converted from arrays at a time


@dataclass(frozen=True, slots=True)
class DrawnRequests:
    """The requests that a workload draws or reads from its file, before truncation to the context.

    `inputs` and `outputs` are numbers of tokens, 1 or more. `times` are seconds from the first request, ascending;
    None if there are none. `prompts` are token ids; None for random prompts. `prefixes` are the prompts' shared
    prefixes, None for a prompt that shares nothing; None if the file has no hash ids.
    """

    inputs: Ints
    outputs: Ints
    times: Floats | None = None
    prompts: list[list[int]] | None = None
    prefixes: list[PrefixIds | None] | None = None


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
    num_cut: int = 0  # requests truncated to the context
    entries: Ints | None = None  # index of each request's prompt; None: in order
    prompts: list[list[int]] | None = None  # token ids, by prompt; None: random prompts
    prefixes: list[PrefixIds | None] | None = None  # shared prefix of each prompt; None: not known
    priorities: tuple[int, ...] = (0,)  # assigned to requests round-robin
    warmup: Workload | None = None  # requests completed before the first of these arrives; not measured

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
        """Return the requests `taken`; they arrive at `arrivals`, or at their own times shifted to start at 0."""
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
