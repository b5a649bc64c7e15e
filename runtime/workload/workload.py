"""A workload: its requests' lengths and arrivals as arrays, each request made when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

# Streams of random numbers of one seed, so that a new rate leaves lengths and prompts as they were.
LENGTHS, ARRIVALS, PROMPTS = range(3)


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


@dataclass(frozen=True, slots=True)
class WorkItem:
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
        return self.item(number, self._prompt(number))

    def item(self, number: int, prompt: Sequence[int]) -> WorkItem:
        """Request `number` with another prompt than its own, of the same length."""
        return WorkItem(
            prompt=prompt,
            output_len=int(self.output_lens[number]),
            arrival=float(self.arrivals[number]),
            user=f"user-{number % self.users}" if self.users > 1 else "",
            deadline=self.deadline,
        )

    def without_prompts(self) -> Iterator[WorkItem]:
        """The requests, each prompt so many zeros: nothing looks at tokens in a simulation."""
        for number, length in enumerate(self.input_lens.tolist()):
            yield self.item(number, bytes(length))

    def _prompt(self, number: int) -> list[int]:
        length = int(self.input_lens[number])
        if self.prompts is not None:
            return self.prompts[number][:length]
        generator = np.random.default_rng((self.seed, PROMPTS, number))
        ids: list[int] = generator.integers(self.vocab_size, size=length).tolist()
        return ids
