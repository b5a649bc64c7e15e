"""Messages between the coordinator and the ranks: ids only, as msgpack, never pickle.

The coordinator publishes one `MicroBatchMessage` to all ranks for each micro-batch. Each rank derives from it what it
needs: its receives, its block tables, its sampler's history. `MicroBatchResult`s come back: spans from every stage,
tokens from the last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from ...conf.sampling import SamplingParams
from ...conf.structured_outputs import StructuredOutputs
from .columns import entries, pack, unpack

UNSEEN_TOKEN: Final = -1


class NewRequest(msgspec.Struct, frozen=True, array_like=True):
    """What the ranks need to know of a request, sent with its first chunk. `seed` is resolved: never None.

    `past` are the tokens before that chunk, which no chunk brings, as they came from the prefix cache. They are sent
    where sampling goes by them.
    """

    request: int
    prompt_len: int
    seed: int
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...]
    past: Sequence[int] = ()


class SegmentMessage(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of one request in a micro-batch: a chunk, or a decode.

    `start` tokens of the request lie in the KV cache already. `blocks` are the KV blocks that the request has got since
    its last message. `targets` are tokens of the prompt that follow the first rows of a chunk, one a row: the last
    stage returns their log-probabilities.
    """

    request: int
    start: int
    tokens: Sequence[int]
    blocks: list[int]
    sample: bool  # the last stage samples a token from the last row
    targets: Sequence[int] = ()

    @property
    def num_tokens(self) -> int:
        """The tokens that this segment adds to the KV cache."""
        return len(self.tokens)


class DecodesMessage(msgspec.Struct, frozen=True, array_like=True):
    """The decodes of a micro-batch by column (`core/columns.py`), one entry a row.

    Iterating gives a `SegmentMessage` each. `blocks`, by request: the KV blocks that it has got since its last message;
    most decodes need none. A request's draft tokens follow its newest token as rows of the same request; `drafts` is
    their number over all requests. Where a pipeline looks ahead, a token may be `UNSEEN_TOKEN`: it stands for the one
    that the micro-batch before samples for the request.
    """

    requests: bytes = b""
    starts: bytes = b""
    tokens: bytes = b""
    blocks: dict[int, list[int]] = {}
    drafts: int = 0

    @classmethod
    def of(
        cls, requests: Sequence[int], starts: Sequence[int], tokens: Sequence[int], blocks: dict[int, list[int]]
    ) -> DecodesMessage:
        """Pack columns of one integer a decode; `blocks` has the new blocks of some rows."""
        return cls(pack(requests), pack(starts), pack(tokens), blocks)

    def __len__(self) -> int:
        return entries(self.requests)

    def __iter__(self) -> Iterator[SegmentMessage]:
        last = -1
        for request, start, token in zip(unpack(self.requests), unpack(self.starts), unpack(self.tokens), strict=True):
            blocks = self.blocks.get(request, []) if request != last else []
            yield SegmentMessage(request, start, [token], blocks, True)
            last = request


class MicroBatchMessage(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """A micro-batch, published to all ranks.

    The ranks forget `dropped` requests (finished or preempted) before they apply its segments.
    """

    epoch: int
    micro_batch: int
    chunks: list[SegmentMessage]
    decodes: DecodesMessage
    new: list[NewRequest] = []
    dropped: list[int] = []

    @property
    def num_tokens(self) -> int:
        """The tokens of all chunks and decodes, which are rows of the activation."""
        return sum(c.num_tokens for c in self.chunks) + len(self.decodes)


class Compile(msgspec.Struct, frozen=True, array_like=True, tag="compile"):
    """Has the ranks of the last stage compile structured outputs of requests to come. One answers with `Compiled`."""

    number: int
    wanted: StructuredOutputs


class Compiled(msgspec.Struct, frozen=True, array_like=True, tag="compiled"):
    """What `Compile` of the same number asked for is done, as far as it can be."""

    number: int


class Stop(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """Ends the ranks, once they have run what was published before."""


class Span(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """When a stage computed a micro-batch, in seconds on the coordinator's clock.

    `ready`: from then on the stage waited for this input; `input`: the input was there; `begin`, `end`: of the
    computation; `sent`: the send had been handed over (equal to `end` on the last stage). `contended_before`: seconds
    until `begin` in which the rank's threads waited for a processor, all together; `contended`: seconds of the
    computation in which its thread did. Both are 0 where they were not measured.

    `expert_load`: tokens of the busiest expert over the mean of all, over the stage's layers; 0 without experts, and
    where nothing was counted. `hot_expert` of layer `hot_layer` had the most tokens.
    """

    micro_batch: int
    stage: int
    ready: float
    input: float
    begin: float
    end: float
    sent: float
    contended_before: float = 0.0
    contended: float = 0.0
    expert_load: float = 0.0
    hot_layer: int = 0
    hot_expert: int = 0


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """The log-probability of one token, its rank among all tokens, and the most probable tokens.

    The most probable token has rank 1. `top` holds (token id, log-probability), best first.
    """

    logprob: float
    rank: int
    top: list[tuple[int, float]]


class Sampled(msgspec.Struct, frozen=True, array_like=True):
    """The tokens that a micro-batch sampled, in its order.

    There is one for each chunk that ends its prompt, then one for each row of its decodes. A token of -1 says that the
    logits were not finite.

    `logprobs`, by place in `tokens`, and `prompt_logprobs`, of a chunk's targets by its place among the chunks: for
    requests that asked for them. A rank of the last stage sends those of the rows that it sampled, as one of
    `num_shares`; in a message to the coordinator there is one.
    """

    tokens: list[int]
    logprobs: dict[int, TokenLogprobs] = {}
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
    num_shares: int = 1


class MicroBatchResult(msgspec.Struct, frozen=True, array_like=True, tag="result"):
    """Spans of a micro-batch, one from the tensor-parallel rank 0 of each stage that reports.

    Only the last stage sends `sampled`, each rank of it for its rows. With all of them the micro-batch is over.
    """

    epoch: int
    micro_batch: int
    spans: list[Span]
    sampled: Sampled | None = None


class RankFailure(msgspec.Struct, frozen=True, array_like=True, tag="failure"):
    """The error that ends a rank, sent by the rank itself."""

    rank: int
    stage: int
    error: str
    secondary: bool = False  # most likely the echo of another rank's death (a broken connection)
