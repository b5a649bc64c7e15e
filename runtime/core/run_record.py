"""The record of a run, kept by the coordinator for the ledger: what each micro-batch held, and why stage 0 waited."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import msgspec

from .columns import entries, pack, total, unpack
from .messages import Span
from .request_record import RequestRecord
from .stage_floor import StageFloor

# Why the coordinator could not dispatch: the depth was reached, the scheduler had nothing admissible, all requests that
# ran waited for their KV from another pipeline, or the pipeline had failed and did not stand again.
# In a run that was read from a trace the reason may be unknown, or that stage 0 was held up by its own send: in other
# engines a send may wait for its receiver.
Blocked = Literal["depth_full", "no_request", "in_flight", "kv_full", "kv_transfer", "recovery", "unknown", "send"]

# What the trace of another engine may not say: its requests, its stages, its KV cache, its queue, what each micro-batch
# held, the KV tokens that decodes attend to. A micro-batch without tokens is one of which nothing is known.
Unknown = Literal["requests", "stages", "kv", "queue", "tokens", "context"]

# What ended an epoch: a rank's process ended, one raised, nothing made progress, or a connection between ranks broke.
FaultReason = Literal["process", "error", "hang", "connection"]


class Wait(msgspec.Struct, frozen=True, gc=False):
    """A time in which nothing could be dispatched, for `reason`; seconds on the coordinator's clock.

    It ends when the last stage finished a micro-batch or a request arrived, not when the coordinator received word of
    it: the rest until the dispatch is control time.
    """

    start: float
    end: float
    reason: Blocked


class SegmentRecord(msgspec.Struct, frozen=True, gc=False):
    """Tokens of one request in a micro-batch: a chunk, or a decode. Before them `start` tokens lie in the KV cache."""

    request: int
    start: int
    tokens: int


class DecodesRecord(msgspec.Struct, frozen=True, gc=False):
    """The decodes of a micro-batch by column (`core/columns.py`), an entry a row as in `DecodesMessage`.

    Iterating gives a `SegmentRecord` for each.
    """

    request_column: bytes = b""
    start_column: bytes = b""

    @classmethod
    def at(cls, requests: Sequence[int] = (), starts: Sequence[int] = ()) -> DecodesRecord:
        """Make the columns from lists: `starts[i]` tokens of `requests[i]` lie in the KV cache before."""
        return cls(pack(requests), pack(starts))

    @classmethod
    def of(cls, parts: Iterable[SegmentRecord]) -> DecodesRecord:
        """Make the columns of decodes that are recorded one by one."""
        parts = list(parts)
        return cls.at([part.request for part in parts], [part.start for part in parts])

    @property
    def requests(self) -> memoryview[int]:
        """The request of each decode, by number."""
        return unpack(self.request_column)

    @property
    def starts(self) -> memoryview[int]:
        """The position of each decode's token in its request, which is the number of tokens before it."""
        return unpack(self.start_column)

    @property
    def distinct(self) -> tuple[int, ...]:
        """The requests, each once."""
        return _distinct(self.request_column)

    @property
    def context(self) -> int:
        """Sum of the KV tokens that each row attends to."""
        return total(self.start_column) + len(self)

    def __len__(self) -> int:
        return entries(self.request_column)

    def __getitem__(self, index: int) -> SegmentRecord:
        return SegmentRecord(self.requests[index], self.starts[index], 1)

    def __iter__(self) -> Iterator[SegmentRecord]:
        return (SegmentRecord(request, start, 1) for request, start in zip(self.requests, self.starts, strict=True))


@lru_cache(maxsize=64)  # the same requests decode in one micro-batch after the other
def _distinct(request_column: bytes) -> tuple[int, ...]:
    return tuple(dict.fromkeys(unpack(request_column).tolist()))


class MicroBatchRecord(msgspec.Struct, gc=False):
    """What the coordinator recorded of one micro-batch. Times are seconds on the coordinator's clock."""

    micro_batch: int
    dispatched: float
    chunks: list[SegmentRecord]
    decodes: DecodesRecord
    waits: list[Wait] = []  # since the dispatch of the micro-batch before
    completed: float | None = None
    kv_blocks_used: int = 0
    num_waiting: int = 0  # requests not yet admitted, at dispatch
    num_running: int = 0
    sampled_rows: int = 0  # rows of decodes, and chunks that end their prompt
    predicted: list[float] | None = None  # seconds by stage, by the scheduler's prediction at dispatch
    drafts: int = 0  # rows of decodes that verify draft tokens
    accepted: int = 0  # of the drafts: tokens that joined an output

    @property
    def prefill_tokens(self) -> int:
        """The tokens of all chunks."""
        return sum(c.tokens for c in self.chunks)

    @property
    def decode_tokens(self) -> int:
        """The number of decodes, each of which has one token."""
        return len(self.decodes)

    @property
    def num_tokens(self) -> int:
        """The tokens of all chunks and decodes."""
        return self.prefill_tokens + self.decode_tokens

    @property
    def decode_context(self) -> int:
        """Sum of the KV tokens that each decode attends to."""
        return self.decodes.context


class FaultRecord(msgspec.Struct, gc=False):
    """A fault that ended an epoch of the pipeline, and its repair. Times are seconds on the coordinator's clock.

    `parts` are the seconds of the repair, by name in their order ("stop", "start", "rendezvous", "weights"); they come
    with `up`.
    """

    epoch: int  # the one that began with this fault
    reason: FaultReason
    text: str  # the fault in words
    since: float  # of the last sign of progress before it
    detected: float
    up: float | None = None  # when stages stood again, or the repair met the next fault
    parts: dict[str, float] = {}
    ranks: list[int] = []  # that were started again
    requests: int = 0  # unfinished, which went back to the queue
    tokens: int = 0  # of theirs that had been computed, and are computed again
    stages: int | None = None  # that stand since, where one has no place any more

    @property
    def seconds(self) -> float | None:
        """From the last sign of progress until stages stood again."""
        return None if self.up is None else self.up - self.since


@dataclass(slots=True)
class RunRecord:
    """The record of a whole run, from which its ledger and its report are made."""

    num_stages: int
    num_blocks: int
    micro_batches: list[MicroBatchRecord] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    requests: list[RequestRecord] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # the scheduler's own choices and why, a line each
    stage_weights: list[list[float]] | None = None  # of `Features`, that it learned: [stages, features]
    batch: int = 0  # B, most requests of a micro-batch
    depth: int = 0  # most micro-batches in flight, without one that is ahead
    faults: list[FaultRecord] = field(default_factory=list)
    floors: list[StageFloor] = field(default_factory=list)  # of each stage; empty where its machine is not known
    unknown: list[Unknown] = field(default_factory=list)  # what a trace did not say; nothing, where gapless recorded
    # Of a window of a server's run: requests that came before it or outlasted it, with their tokens of the window; and
    # when it began and ended, each where no request was there then.
    crossing: list[RequestRecord] = field(default_factory=list)
    window: tuple[float | None, float | None] = (None, None)

    @property
    def start(self) -> float:
        """The first arrival, or the first compute where that is earlier, in seconds; 0 where there is neither."""
        begun = (span.begin for span in self.spans)
        return min([*begun, *(request.arrival for request in self.requests)], default=0.0)

    @property
    def standing_stages(self) -> int:
        """How many stages there are now: fewer than `num_stages` where a fault has left no place for one."""
        return min([self.num_stages, *(fault.stages for fault in self.faults if fault.stages is not None)])
