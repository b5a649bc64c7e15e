"""Messages between the coordinator and the ranks: ids only, as msgpack, never pickle.

The coordinator publishes one `MicroBatchMessage` per micro-batch to all ranks. Each rank derives its receives, its
block tables and its sampler's history from it. `MicroBatchResult`s return spans from every stage, and tokens from the
last one.
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
    """What the ranks need to know about a request, sent with its first chunk. `seed` is resolved: never None.

    `past` are the tokens before that chunk, from the prefix cache. They are sent only if sampling depends on them.
    """

    request: int
    prompt_len: int
    seed: int
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...]
    past: Sequence[int] = ()


class SegmentMessage(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of one request in a micro-batch: a chunk, or a decode.

    `start` tokens of the request are already in the KV cache. `blocks` are the KV blocks allocated since its last
    message. `targets` are the prompt tokens that follow the first rows of a chunk, one per row: the last stage returns
    their log-probabilities.
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
    """The decodes of a micro-batch by column (`core/columns.py`), one entry per row.

    Iterating yields one `SegmentMessage` per row. `blocks`: KV blocks allocated since the last message, by request;
    most decodes need none. A request's draft tokens follow its newest token as rows of the same request; `drafts` is
    their total number. If the pipeline looks ahead (async scheduling), a token may be `UNSEEN_TOKEN`: a placeholder for
    the token that the previous micro-batch samples for the request.
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
        """Pack columns of one integer per row; `blocks` has the new blocks, by request."""
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
        """The tokens of all chunks and decodes, i.e. the rows of the activation."""
        return sum(c.num_tokens for c in self.chunks) + len(self.decodes)


class Compile(msgspec.Struct, frozen=True, array_like=True, tag="compile"):
    """Makes the last stage's ranks compile structured outputs of coming requests. One rank replies with `Compiled`."""

    number: int
    wanted: StructuredOutputs


class Compiled(msgspec.Struct, frozen=True, array_like=True, tag="compiled"):
    """Reply to the `Compile` of the same number: the compilation has ended."""

    number: int


class Stop(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """Shuts down the ranks, after they have run everything published before it."""


class Span(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """When a stage computed a micro-batch, in seconds on the coordinator's clock.

    `ready`: the stage began to wait for this input; `input`: the input had arrived; `begin`, `end`: computation;
    `sent`: the send had been handed over (equal to `end` on the last stage). `contended_before`: seconds before `begin`
    in which the rank's threads waited for a CPU, summed over threads; `contended`: seconds of the computation in which
    its thread did. Both are 0 if not measured.

    `expert_load`: tokens of the busiest expert over the mean of all experts, over the stage's layers; 0 without experts
    or counts. `hot_expert` of layer `hot_layer` had the most tokens.
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
    """The tokens that a micro-batch sampled, in order.

    There is one per chunk that ends its prompt, then one per decode row. A token of -1 means that the logits were not
    finite.

    `logprobs`, keyed by index in `tokens`, and `prompt_logprobs` of a chunk's targets, keyed by chunk index, are for
    requests that asked for them. A rank of the last stage sends the results of the rows that it sampled, as one of
    `num_shares`; a message to the coordinator has a single share.
    """

    tokens: list[int]
    logprobs: dict[int, TokenLogprobs] = {}
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
    num_shares: int = 1


class MicroBatchResult(msgspec.Struct, frozen=True, array_like=True, tag="result"):
    """Spans of a micro-batch, one from tensor-parallel rank 0 of each stage that reports.

    Only ranks of the last stage send `sampled`, each for its own rows. With all of them the micro-batch is complete.
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
    secondary: bool = False  # most likely a consequence of another rank's failure (a broken connection)
