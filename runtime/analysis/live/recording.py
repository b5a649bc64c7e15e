"""Records a window of an ongoing run, streamed out of the engine process in parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from ...core.latencies import GOES_ON
from ...core.messages import Span
from ...core.numbers import counted
from ...core.request_record import RequestRecord
from ...core.run_record import FaultRecord, MicroBatchRecord, RunRecord
from ...core.stage_floor import StageFloor
from ..run_folder.record_jsonl import RequestLine

_MOST_AT_ONCE = 256  # micro-batches, or requests, per part


class RecordedPart(msgspec.Struct, frozen=True):
    """The increment since the last part: micro-batches computed by all stages, their spans, and finished requests.

    The last part also contains the requests `crossing` the edges of the window, with their tokens in it, the faults of
    the window, and its start and end, as in `RunRecord`.
    """

    num_stages: int
    num_blocks: int
    batch: int
    depth: int
    micro_batches: list[MicroBatchRecord] = []
    spans: list[Span] = []
    requests: list[RequestLine] = []
    notes: list[str] = []
    stage_weights: list[list[float]] | None = None
    crossing: list[RequestLine] = []
    faults: list[FaultRecord] = []
    window: tuple[float | None, float | None] = (None, None)
    floors: list[StageFloor] = []


encoder = msgspec.msgpack.Encoder()
decoder = msgspec.msgpack.Decoder(RecordedPart)


class Recording:
    """Collects the parts of a window.

    The window contains the micro-batches dispatched between its start and `stop`, and the requests that arrive and
    finish in it. For other requests it contains the tokens generated in it.

    Args:
        record: the run's record.
        first: the number of the first micro-batch of the window.
        unfinished: requests already in the system.
        now: the current time, in seconds.
    """

    def __init__(self, record: RunRecord, first: int, unfinished: Sequence[RequestRecord], now: float) -> None:
        self._record = record
        self._first = first
        self._end: int | None = None
        self._next = first
        self._requests = list(unfinished)
        self._earlier_tokens = {request.request: request.output_tokens for request in unfinished}
        self._until = now  # end of the window so far, including its micro-batches
        self._window: tuple[float | None, float | None] = (None if unfinished else now, None)
        self._num_faults = sum(fault.up is not None for fault in record.faults)  # repaired before the window

    def first_part(self) -> bytes:
        """Return an empty encoded part that marks the start of the window."""
        return self._encode()

    def add(self, request: RequestRecord) -> None:
        """Add an arrived request."""
        if self._end is None:
            self._requests.append(request)

    def stop(self, end: int, now: float) -> None:
        """End the window before micro-batch `end`."""
        self._end, self._until = end, max(self._until, now)
        if all(request.finished is not None for request in self._requests):
            self._window = (self._window[0], now)

    def take(self, micro_batches: Sequence[MicroBatchRecord]) -> Iterator[bytes]:
        """Yield the increment since the last call as encoded parts.

        Args:
            micro_batches: the record's micro-batches that all stages have computed since the last call.
        """
        end = self._end
        new = [m for m in micro_batches if m.micro_batch >= self._first and (end is None or m.micro_batch < end)]
        if micro_batches:
            self._next = micro_batches[-1].micro_batch + 1
        numbers = {m.micro_batch for m in new}
        spans = [span for span in self._record.spans if span.micro_batch in numbers]
        self._until = max([self._until, *(m.completed for m in new if m.completed is not None)])
        ended = [request for request in self._requests if self._holds(request)]
        self._requests = [request for request in self._requests if not self._holds(request)]
        for start in range(0, max(len(new), len(ended)), _MOST_AT_ONCE):
            part = new[start : start + _MOST_AT_ONCE]
            low, high = (part[0].micro_batch, part[-1].micro_batch) if part else (0, -1)
            yield self._encode(
                micro_batches=part,
                spans=[span for span in spans if low <= span.micro_batch <= high],
                requests=[_recorded(request) for request in ended[start : start + _MOST_AT_ONCE]],
            )

    def is_complete(self, has_work: bool) -> bool:
        """Return whether the window has ended and all its micro-batches were taken.

        Without work, no more spans will arrive.
        """
        return self._end is not None and (self._next >= self._end or not has_work)

    def last_part(self) -> bytes:
        """Return the encoded part that ends the window."""
        record = self._record
        crossing = [self._cut(request) for request in self._requests if not self._holds(request)]
        return self._encode(
            notes=record.notes,
            requests=[_recorded(request) for request in self._requests if self._holds(request)],
            stage_weights=record.stage_weights,
            crossing=[request for request in crossing if request.token_times],
            faults=record.faults[self._num_faults :],
            window=self._window,
        )

    def _holds(self, request: RequestRecord) -> bool:
        """Return whether a request arrived and finished in the window."""
        return self._has_ended(request) and request.request not in self._earlier_tokens

    def _has_ended(self, request: RequestRecord) -> bool:
        return request.finished is not None and request.finished <= self._until

    def _cut(self, request: RequestRecord) -> RequestLine:
        """Return the part inside the window of a request that crosses its edges."""
        earlier = self._earlier_tokens.get(request.request, 0)
        return msgspec.structs.replace(
            _recorded(request),
            token_times=[at for at in request.token_times[earlier:] if at <= self._until],
            finish_reason=request.finish_reason if self._has_ended(request) else GOES_ON,
            earlier_tokens=earlier,
        )

    def _encode(self, **fields: object) -> bytes:
        record = self._record
        about = (record.num_stages, record.num_blocks, record.batch, record.depth)
        return encoder.encode(RecordedPart(*about, floors=record.floors, **fields))  # type: ignore[arg-type]


def join_parts(parts: Iterator[bytes]) -> RunRecord:
    """Join the parts of a window into its record."""
    record: RunRecord | None = None
    for payload in parts:
        record = with_part(record, part := decoder.decode(payload))
        record.crossing += _records_of(part.crossing)
        record.notes += part.notes
        record.stage_weights = part.stage_weights
        record.faults += part.faults
        record.window = part.window
        if part.crossing:
            record.notes.append(
                f"a window of a server's run: {counted(len(part.crossing), 'request')} started before it or continued "
                "after it. Their tokens within the window count, but the table of requests leaves them out."
            )
    assert record is not None
    record.requests.sort(key=lambda request: request.request)
    return record


def with_part(record: RunRecord | None, part: RecordedPart) -> RunRecord:
    """Add a part's micro-batches, spans and requests to the record, created for the first part, and return it."""
    record = record or RunRecord(
        part.num_stages, part.num_blocks, batch=part.batch, depth=part.depth, floors=part.floors
    )
    record.micro_batches += part.micro_batches
    record.spans += part.spans
    record.requests += _records_of(part.requests)
    return record


def _records_of(requests: Sequence[RequestLine]) -> list[RequestRecord]:
    return [RequestRecord(**msgspec.structs.asdict(request)) for request in requests]


def _recorded(request: RequestRecord) -> RequestLine:
    return RequestLine(**{name: getattr(request, name) for name in RequestLine.__struct_fields__})
