"""What travels between the coordinator and the ranks: ids only, msgpack, never pickle.

One `Step` is published to all ranks for each micro-batch; each rank replays from it what it needs: its receives, its
block tables, its sampler's history. `StepResult` comes back: spans from every stage, tokens from the last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from ...conf.sampling import SamplingParams
from .columns import entries, pack, unpack


class NewRequest(msgspec.Struct, frozen=True, array_like=True):
    """Told to all ranks with the first chunk of a request. `seed` is resolved: never None for a sampled request."""

    request: int
    prompt_len: int
    seed: int
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...]


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of one request in a micro-batch: a chunk, or a decode. `blocks` are those newly owned."""

    request: int
    start: int
    tokens: Sequence[int]
    blocks: list[int]
    sample: bool  # the last stage samples a token from the last row

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


class Decodes(msgspec.Struct, frozen=True, array_like=True):
    """The decodes of a micro-batch by column, 8 bytes an entry, an entry a request; iterating gives a `Segment` each.

    `blocks`: those newly owned, by request; most decodes need none.
    """

    requests: bytes = b""
    starts: bytes = b""
    tokens: bytes = b""
    blocks: dict[int, list[int]] = {}

    @classmethod
    def of(
        cls, requests: Sequence[int], starts: Sequence[int], tokens: Sequence[int], blocks: dict[int, list[int]]
    ) -> Decodes:
        return cls(pack(requests), pack(starts), pack(tokens), blocks)

    def __len__(self) -> int:
        return entries(self.requests)

    def __iter__(self) -> Iterator[Segment]:
        for request, start, token in zip(unpack(self.requests), unpack(self.starts), unpack(self.tokens), strict=True):
            yield Segment(request, start, [token], self.blocks.get(request, []), True)


class MicroBatchMessage(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """A micro-batch. `dropped` requests (finished or preempted) forget their tables before the segments apply."""

    epoch: int
    micro_batch: int
    chunks: list[Segment]
    decodes: Decodes
    new: list[NewRequest] = []
    dropped: list[int] = []

    @property
    def num_tokens(self) -> int:
        return sum(c.num_tokens for c in self.chunks) + len(self.decodes)


class Stop(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """The ranks end after what was published before."""


class Span(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a stage did with a micro-batch, in seconds on the coordinator's clock.

    `ready`: the stage had nothing else to do and waited for this input; `input`: the input was there; `begin`, `end`:
    compute; `sent`: the send had been handed over (equal to `end` on the last stage).
    """

    micro_batch: int
    stage: int
    ready: float
    input: float
    begin: float
    end: float
    sent: float


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Of one sampled token: its log-probability, its rank among all by it, from 1, and the best as (token id,
    log-probability), best first."""

    logprob: float
    rank: int
    top: list[tuple[int, float]]


class Sampled(msgspec.Struct, frozen=True, array_like=True):
    """The tokens that a micro-batch sampled, in its order: of chunks that end their prompt, then of decodes.

    `logprobs`: by request, of those that asked for them.
    """

    tokens: list[int]
    logprobs: dict[int, TokenLogprobs] = {}


class MicroBatchResult(msgspec.Struct, frozen=True, array_like=True, tag="result"):
    """What stages did with a micro-batch (one entry from a stage's tensor-parallel rank 0). Only the last stage tells
    what was `sampled`, and with that the micro-batch is over."""

    epoch: int
    micro_batch: int
    spans: list[Span]
    sampled: Sampled | None = None


class RankFailure(msgspec.Struct, frozen=True, array_like=True, tag="failure"):
    """A rank's own last word before it ends."""

    rank: int
    stage: int
    error: str
    secondary: bool = False  # most likely the echo of another rank's death (a broken connection)
