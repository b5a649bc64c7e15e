"""What the coordinator records of a run, for the ledger: each micro-batch's make-up and why stage 0 waited."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from .columns import entries, pack, total, unpack
from .messages import Span
from .request_record import RequestRecord

# Why the coordinator could not dispatch: the depth was reached, or the scheduler had nothing admissible.
Blocked = Literal["depth_full", "no_request", "in_flight", "kv_full"]


class Wait(msgspec.Struct, frozen=True, gc=False):
    """From `start` to `end` (seconds, coordinator's clock) nothing could be dispatched, for `reason`.

    `end` is when the event that ended it truly happened (the last stage finished a micro-batch, a request arrived), not
    when the coordinator heard of it: the rest until the dispatch is control time.
    """

    start: float
    end: float
    reason: Blocked


class Part(msgspec.Struct, frozen=True, gc=False):
    """One request's share of a micro-batch: `tokens` of them on a KV prefix of `start`."""

    request: int
    start: int
    tokens: int


class Decodes(msgspec.Struct, frozen=True, gc=False):
    """The decodes of a micro-batch by column, 8 bytes an entry: runs have millions. Iterating gives a `Part` each."""

    request_column: bytes = b""
    start_column: bytes = b""

    @classmethod
    def at(cls, requests: Sequence[int] = (), starts: Sequence[int] = ()) -> Decodes:
        """Of these requests, each on a KV prefix of its start."""
        return cls(pack(requests), pack(starts))

    @classmethod
    def of(cls, parts: Iterable[Part]) -> Decodes:
        parts = list(parts)
        return cls.at([part.request for part in parts], [part.start for part in parts])

    @property
    def requests(self) -> memoryview[int]:
        return unpack(self.request_column)

    @property
    def starts(self) -> memoryview[int]:
        return unpack(self.start_column)

    @property
    def context(self) -> int:
        """KV tokens that they attend to, summed."""
        return total(self.start_column) + len(self)

    def __len__(self) -> int:
        return entries(self.request_column)

    def __getitem__(self, index: int) -> Part:
        return Part(self.requests[index], self.starts[index], 1)

    def __iter__(self) -> Iterator[Part]:
        return (Part(request, start, 1) for request, start in zip(self.requests, self.starts, strict=True))


class MicroBatchRecord(msgspec.Struct, gc=False):
    """One micro-batch as the coordinator saw it. Times are seconds on the coordinator's clock."""

    micro_batch: int
    dispatched: float
    chunks: list[Part]
    decodes: Decodes
    waits: list[Wait] = []  # between the dispatch before and this one
    completed: float | None = None
    kv_blocks_used: int = 0
    num_waiting: int = 0  # requests not yet admitted, at dispatch
    num_running: int = 0
    sampled_rows: int = 0  # decodes, and chunks that end their prompt
    predicted: list[float] | None = None  # seconds by stage, as the scheduler foresaw them at dispatch

    @property
    def prefill_tokens(self) -> int:
        return sum(c.tokens for c in self.chunks)

    @property
    def decode_tokens(self) -> int:
        return len(self.decodes)

    @property
    def num_tokens(self) -> int:
        return self.prefill_tokens + self.decode_tokens

    @property
    def decode_context(self) -> int:
        """KV tokens that the decodes attend to, summed."""
        return self.decodes.context


@dataclass(slots=True)
class RunRecord:
    """All that a run leaves for its ledger and its report."""

    num_stages: int
    num_blocks: int
    micro_batches: list[MicroBatchRecord] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    requests: list[RequestRecord] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what the scheduler chose by itself and why, a line each
    stage_times: list[list[float]] | None = None  # what it learned (`scheduler/learned/stage_times.py`)
