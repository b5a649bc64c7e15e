"""A workload: its requests' lengths and arrivals as arrays, each request made when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import msgspec
import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

# Streams of random numbers of one seed, so that a new rate leaves lengths and prompts as they were.
LENGTHS, ARRIVALS, PROMPTS = range(3)
_AT_A_TIME = 4096  # requests that leave the arrays together


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a workload's own rule or file says of each request.

    `inputs`, `outputs`: tokens, 1 or more. `times`: seconds from the first, rising; None: nothing is said of them.
    `prompts`: token ids; None: any will do.
    """

    inputs: Ints
    outputs: Ints
    times: Floats | None = None
    prompts: list[list[int]] | None = None


class WorkItem(msgspec.Struct, frozen=True):
    """One request: `prompt` token ids, exactly `output_len` tokens out, `arrival` seconds after the start.

    `deadline`: seconds after its arrival when the first token is due; None: no such bound. `user` is "" where the
    workload has one user.
    """

    prompt: Sequence[int]
    output_len: int
    arrival: float
    user: str = ""
    deadline: float | None = None


@dataclass(frozen=True, slots=True)
class Workload(Sequence[WorkItem]):
    """Requests in the order of their arrival. `input_lens`, `output_lens`: tokens; `arrivals`: seconds from the start.

    `num_cut` of them were longer than the context and are cut to it. A random prompt depends on the seed and the
    request's number only.
    """

    input_lens: Ints
    output_lens: Ints
    arrivals: Floats
    vocab_size: int
    seed: int = 0
    users: int = 1
    deadline: float | None = None  # seconds after arrival
    num_cut: int = 0
    prompts: list[list[int]] | None = None

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
        return WorkItem(self._prompt(number), output_len, arrival, self._user(number), self.deadline)

    def without_prompts(self) -> Iterator[WorkItem]:
        """The requests, each prompt so many zeros: nothing looks at tokens in a simulation."""
        for first in range(0, len(self), _AT_A_TIME):
            some = slice(first, first + _AT_A_TIME)
            columns = [array[some].tolist() for array in (self.input_lens, self.output_lens, self.arrivals)]
            for number, (length, output_len, arrival) in enumerate(zip(*columns, strict=True), first):
                yield WorkItem(bytes(length), output_len, arrival, self._user(number), self.deadline)

    def _user(self, number: int) -> str:
        return f"user-{number % self.users}" if self.users > 1 else ""

    def _prompt(self, number: int) -> list[int]:
        length = int(self.input_lens[number])
        if self.prompts is not None:
            return self.prompts[number][:length]
        generator = np.random.default_rng((self.seed, PROMPTS, number))
        ids: list[int] = generator.integers(self.vocab_size, size=length).tolist()
        return ids
