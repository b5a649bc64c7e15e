"""Recording a window of a run while it goes on: what the engine hands out of its process, piece by piece."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from ..core.messages import Span
from ..core.request_record import RequestRecord
from ..core.run_record import FaultRecord, MicroBatchRecord, RunRecord

_MOST_AT_ONCE = 256  # micro-batches, or requests, of a part


class RecordedRequest(msgspec.Struct, frozen=True, array_like=True):
    """A `RequestRecord`."""

    request: int
    prompt_tokens: int
    arrival: float
    token_times: list[float]
    first_dispatched: float | None
    finished: float | None
    finish_reason: str | None
    preemptions: int
    cached_tokens: int
    kv_transfer: tuple[float, float] | None
    user: str


class RecordedPart(msgspec.Struct, frozen=True):
    """What is new of a window: micro-batches that all stages have computed, with their spans, and requests that ended.

    In the last part are `crossing`, how many requests had come before the window or had not ended with it, and the
    faults of the window.
    """

    num_stages: int
    num_blocks: int
    batch: int
    depth: int
    micro_batches: list[MicroBatchRecord] = []
    spans: list[Span] = []
    requests: list[RecordedRequest] = []
    notes: list[str] = []
    stage_weights: list[list[float]] | None = None
    crossing: int = 0
    faults: list[FaultRecord] = []


encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(RecordedPart)


class Recording:
    """Collects the parts of a window.

    The window holds the micro-batches that are dispatched between its begin and `stop`, and the requests that come and
    end in it.

    Args:
        record: the run's.
        first: the number of the first micro-batch of the window.
        num_unfinished: requests that are there already.
    """

    def __init__(self, record: RunRecord, first: int, num_unfinished: int) -> None:
        self._record = record
        self._first = first
        self._end: int | None = None
        self._next = first
        self._requests: list[RequestRecord] = []
        self._crossing = num_unfinished
        self._num_faults = sum(fault.up is not None for fault in record.faults)  # that were over before

    def add(self, request: RequestRecord) -> None:
        """Note a request that has come."""
        if self._end is None:
            self._requests.append(request)

    def stop(self, end: int) -> None:
        """End the window before micro-batch `end`."""
        self._end = end

    def take(self, micro_batches: Sequence[MicroBatchRecord]) -> Iterator[bytes]:
        """Yield the parts, encoded, that hold what is new.

        Args:
            micro_batches: of the record, those that all stages have computed since the last call.
        """
        end = self._end
        new = [m for m in micro_batches if m.micro_batch >= self._first and (end is None or m.micro_batch < end)]
        if micro_batches:
            self._next = micro_batches[-1].micro_batch + 1
        numbers = {m.micro_batch for m in new}
        spans = [span for span in self._record.spans if span.micro_batch in numbers]
        ended = [request for request in self._requests if request.finished is not None]
        self._requests = [request for request in self._requests if request.finished is None]
        for start in range(0, max(len(new), len(ended)), _MOST_AT_ONCE):
            part = new[start : start + _MOST_AT_ONCE]
            low, high = (part[0].micro_batch, part[-1].micro_batch) if part else (0, -1)
            yield self._encode(
                micro_batches=part,
                spans=[span for span in spans if low <= span.micro_batch <= high],
                requests=[_recorded(request) for request in ended[start : start + _MOST_AT_ONCE]],
            )

    def is_complete(self, has_work: bool) -> bool:
        """Return whether the window has ended and all that can come of it was taken.

        Without work, no span comes any more.
        """
        return self._end is not None and (self._next >= self._end or not has_work)

    def last_part(self) -> bytes:
        """Return the part, encoded, that ends the window."""
        record = self._record
        return self._encode(
            notes=record.notes,
            stage_weights=record.stage_weights,
            crossing=self._crossing + len(self._requests),
            faults=record.faults[self._num_faults :],
        )

    def _encode(self, **fields: object) -> bytes:
        record = self._record
        about = (record.num_stages, record.num_blocks, record.batch, record.depth)
        return encoder.encode(RecordedPart(*about, **fields))  # type: ignore[arg-type]


def join_parts(parts: Iterator[bytes]) -> RunRecord:
    """Join the parts of a window to its record."""
    record: RunRecord | None = None
    for payload in parts:
        part = _decoder.decode(payload)
        if record is None:
            record = RunRecord(part.num_stages, part.num_blocks, batch=part.batch, depth=part.depth)
        record.micro_batches += part.micro_batches
        record.spans += part.spans
        record.requests += [RequestRecord(*msgspec.structs.astuple(request)) for request in part.requests]
        record.notes += part.notes
        record.stage_weights = part.stage_weights
        record.faults += part.faults
        if part.crossing:
            record.notes.append(
                f"a window of a server's run: {part.crossing} requests came before it or had not ended with it; its "
                "micro-batches hold them, its requests, latencies and throughput do not"
            )
    assert record is not None
    record.requests.sort(key=lambda request: request.request)
    return record


def _recorded(request: RequestRecord) -> RecordedRequest:
    return RecordedRequest(
        request.request,
        request.prompt_tokens,
        request.arrival,
        request.token_times,
        request.first_dispatched,
        request.finished,
        request.finish_reason,
        request.preemptions,
        request.cached_tokens,
        request.kv_transfer,
        request.user,
    )
