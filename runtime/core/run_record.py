"""The record of a run, kept by the coordinator for the ledger: micro-batch contents, and why stage 0 waited."""

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

# Why the coordinator could not dispatch: the depth was reached, the scheduler had nothing admissible, all running
# requests waited for their KV from another pipeline, or a failed pipeline was not restored yet.
# In a run read from a trace the reason may be unknown, or stage 0 may have been blocked in its own send: in other
# engines a send may wait for its receiver.
Blocked = Literal["depth_full", "no_request", "in_flight", "kv_full", "kv_transfer", "recovery", "unknown", "send"]

# What a trace from another engine may lack: requests, stages, KV cache, queue, the contents of micro-batches, the KV
# tokens that decodes attend to. A micro-batch without tokens is one with unknown contents.
Unknown = Literal["requests", "stages", "kv", "queue", "tokens", "context"]

# What ended an epoch: a rank's process exited, a rank raised, progress stopped, or a connection between ranks broke.
FaultReason = Literal["process", "error", "hang", "connection"]


class Wait(msgspec.Struct, frozen=True, gc=False):
    """An interval in which nothing could be dispatched, for `reason`; seconds on the coordinator's clock.

    It ends when the last stage finished a micro-batch or a request arrived, not when the coordinator was notified: the
    remaining time until the dispatch is control time.
    """

    start: float
    end: float
    reason: Blocked


class SegmentRecord(msgspec.Struct, frozen=True, gc=False):
    """Tokens of one request in a micro-batch: a chunk, or a decode. `start` earlier tokens are in the KV cache."""

    request: int
    start: int
    tokens: int


class DecodesRecord(msgspec.Struct, frozen=True, gc=False):
    """The decodes of a micro-batch by column (`core/columns.py`), one entry per row as in `DecodesMessage`.

    Iterating yields one `SegmentRecord` per row.
    """

    request_column: bytes = b""
    start_column: bytes = b""

    @classmethod
    def at(cls, requests: Sequence[int] = (), starts: Sequence[int] = ()) -> DecodesRecord:
        """Make the columns from lists: `starts[i]` earlier tokens of `requests[i]` are in the KV cache."""
        return cls(pack(requests), pack(starts))

    @classmethod
    def of(cls, parts: Iterable[SegmentRecord]) -> DecodesRecord:
        """Make the columns from decodes that were recorded one by one."""
        parts = list(parts)
        return cls.at([part.request for part in parts], [part.start for part in parts])

    @property
    def requests(self) -> memoryview[int]:
        """The request of each decode, by number."""
        return unpack(self.request_column)

    @property
    def starts(self) -> memoryview[int]:
        """The position of each decode's token in its request, i.e. the number of tokens before it."""
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


@lru_cache(maxsize=64)  # consecutive micro-batches often decode the same requests
def _distinct(request_column: bytes) -> tuple[int, ...]:
    return tuple(dict.fromkeys(unpack(request_column).tolist()))


class MicroBatchRecord(msgspec.Struct, gc=False):
    """What the coordinator recorded of one micro-batch. Times are seconds on the coordinator's clock."""

    micro_batch: int
    dispatched: float
    chunks: list[SegmentRecord]
    decodes: DecodesRecord
    waits: list[Wait] = []  # since the previous dispatch
    completed: float | None = None
    kv_blocks_used: int = 0
    num_waiting: int = 0  # requests not yet admitted, at dispatch
    num_running: int = 0
    sampled_rows: int = 0  # decode rows, and chunks that end their prompt
    predicted: list[float] | None = None  # seconds per stage, predicted by the scheduler at dispatch
    drafts: int = 0  # decode rows that verify draft tokens
    accepted: int = 0  # draft tokens that were accepted

    @property
    def prefill_tokens(self) -> int:
        """The tokens of all chunks."""
        return sum(c.tokens for c in self.chunks)

    @property
    def decode_tokens(self) -> int:
        """The number of decode rows, each with one token."""
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

    `parts` are the seconds of the repair by phase, in order ("stop", "start", "rendezvous", "weights"); they are set
    with `up`.
    """

    epoch: int  # the epoch that began with this fault
    reason: FaultReason
    text: str  # description of the fault
    since: float  # last sign of progress before it
    detected: float
    up: float | None = None  # when the pipeline was restored, or the repair hit the next fault
    parts: dict[str, float] = {}
    ranks: list[int] = []  # ranks that were restarted
    requests: int = 0  # unfinished requests that returned to the queue
    tokens: int = 0  # their computed tokens, which are recomputed
    stages: int | None = None  # left after the repair, if a stage could not be placed

    @property
    def seconds(self) -> float | None:
        """Seconds from the last sign of progress until `up`."""
        return None if self.up is None else self.up - self.since


@dataclass(slots=True)
class RunRecord:
    """The record of a whole run, from which its ledger and its report are made."""

    num_stages: int
    num_blocks: int
    micro_batches: list[MicroBatchRecord] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    requests: list[RequestRecord] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # the scheduler's own choices and why, one line each
    stage_weights: list[list[float]] | None = None  # learned weights of `Features`: [stages, features]
    batch: int = 0  # B, most requests of a micro-batch
    depth: int = 0  # most micro-batches in flight, without the look-ahead one
    faults: list[FaultRecord] = field(default_factory=list)
    floors: list[StageFloor] = field(default_factory=list)  # per stage; empty if a machine is not known
    unknown: list[Unknown] = field(default_factory=list)  # what a trace lacks; empty if gapless recorded the run
    # In a recorded window of a server's run: requests that arrived before it or outlasted it, with their tokens of the
    # window; and its begin and end, each None if a request was unfinished at that time.
    crossing: list[RequestRecord] = field(default_factory=list)
    window: tuple[float | None, float | None] = (None, None)

    @property
    def start(self) -> float:
        """The first arrival, or the first compute if that is earlier, in seconds; 0 without either."""
        begun = (span.begin for span in self.spans)
        return min([*begun, *(request.arrival for request in self.requests)], default=0.0)

    @property
    def standing_stages(self) -> int:
        """The current number of stages: fewer than `num_stages` if a fault left no room for one."""
        return min([self.num_stages, *(fault.stages for fault in self.faults if fault.stages is not None)])
