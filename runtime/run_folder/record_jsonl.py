"""`record.jsonl.gz`: a line for the run, for each fault, each micro-batch with its waits, each request with its token
times."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import attrgetter

import msgspec
import numpy as np

from ..core.request_record import RequestRecord
from ..core.run_record import (
    Blocked,
    DecodesRecord,
    FaultReason,
    FaultRecord,
    MicroBatchRecord,
    RunRecord,
    SegmentRecord,
    Unknown,
    Wait,
)


class RunLine(msgspec.Struct, array_like=True, tag="run"):
    """The first line."""

    num_stages: int
    num_blocks: int
    notes: list[str] = []
    batch: int = 0
    depth: int = 0
    unknown: list[Unknown] = []


class FaultLine(msgspec.Struct, array_like=True, tag="fault"):
    """A `FaultRecord`."""

    epoch: int
    reason: FaultReason
    text: str
    since: float
    detected: float
    up: float | None
    parts: dict[str, float]
    ranks: list[int]
    requests: int
    tokens: int
    stages: int | None = None


class MicroBatchLine(msgspec.Struct, array_like=True, tag="step"):
    """A `MicroBatchRecord`."""

    micro_batch: int
    dispatched: float
    completed: float | None
    kv_blocks_used: int
    num_waiting: int
    num_running: int
    chunks: list[tuple[int, int, int]]  # request, start, tokens
    decodes: tuple[list[int], list[int]]  # requests, starts
    waits: list[tuple[float, float, Blocked]]  # start, end, reason
    predicted: list[float] | None = None
    sampled_rows: int = 0
    drafts: int = 0
    accepted: int = 0


class RequestLine(msgspec.Struct, array_like=True, tag="request"):
    """A `RequestRecord`."""

    request: int
    prompt_tokens: int
    arrival: float
    first_dispatched: float | None
    finished: float | None
    finish_reason: str | None
    preemptions: int
    token_times: list[float]
    cached_tokens: int = 0
    kv_transfer: tuple[float, float] | None = None
    user: str = ""


Line = RunLine | FaultLine | MicroBatchLine | RequestLine
_CHUNK_FIELDS = attrgetter("request", "start", "tokens")


def record_lines(record: RunRecord, origin: float) -> Iterator[Line]:
    """The run, its faults, micro-batches and requests. Times are seconds from `origin`, rounded to nanoseconds."""

    def since_origin(seconds: float) -> float:
        return round(seconds - origin, 9)

    def maybe(seconds: float | None) -> float | None:
        return None if seconds is None else since_origin(seconds)

    yield RunLine(record.num_stages, record.num_blocks, record.notes, record.batch, record.depth, record.unknown)
    for f in record.faults:
        yield FaultLine(
            f.epoch, f.reason, f.text, since_origin(f.since), since_origin(f.detected), maybe(f.up),
            {part: round(seconds, 9) for part, seconds in f.parts.items()}, f.ranks, f.requests, f.tokens,
            f.stages,
        )  # fmt: skip
    for m in record.micro_batches:
        waits = [(since_origin(wait.start), since_origin(wait.end), wait.reason) for wait in m.waits]
        yield MicroBatchLine(
            m.micro_batch, since_origin(m.dispatched), maybe(m.completed), m.kv_blocks_used, m.num_waiting,
            m.num_running, list(map(_CHUNK_FIELDS, m.chunks)), (m.decodes.requests.tolist(), m.decodes.starts.tolist()),
            waits, m.predicted and [round(seconds, 9) for seconds in m.predicted], m.sampled_rows,
            m.drafts, m.accepted,
        )  # fmt: skip
    for r in record.requests:
        yield RequestLine(
            r.request, r.prompt_tokens, since_origin(r.arrival), maybe(r.first_dispatched), maybe(r.finished),
            r.finish_reason, r.preemptions, np.round(np.array(r.token_times, np.float64) - origin, 9).tolist(),
            r.cached_tokens, r.kv_transfer and (since_origin(r.kv_transfer[0]), since_origin(r.kv_transfer[1])),
            r.user,
        )  # fmt: skip


def read_record(lines: Iterable[bytes]) -> RunRecord:
    """The record that these lines hold: all of it but spans and stage times.

    Raises:
        ValueError: a line is not one of these, or the first is not the run's (msgspec's errors are `ValueError` too).
    """
    decode = msgspec.json.Decoder(Line).decode
    record: RunRecord | None = None
    for text in lines:
        line = decode(text)
        if isinstance(line, RunLine):
            record = RunRecord(
                line.num_stages, line.num_blocks, notes=line.notes, batch=line.batch, depth=line.depth,
                unknown=line.unknown,
            )  # fmt: skip
        elif record is None:
            raise ValueError("its first line is not the run's")
        elif isinstance(line, FaultLine):
            record.faults.append(FaultRecord(*msgspec.structs.astuple(line)))
        elif isinstance(line, MicroBatchLine):
            record.micro_batches.append(_micro_batch(line))
        else:
            record.requests.append(_request(line))
    if record is None:
        raise ValueError("it is empty")
    return record


def _micro_batch(line: MicroBatchLine) -> MicroBatchRecord:
    return MicroBatchRecord(
        line.micro_batch,
        line.dispatched,
        [SegmentRecord(*part) for part in line.chunks],
        DecodesRecord.at(*line.decodes),
        [Wait(*wait) for wait in line.waits],
        line.completed,
        line.kv_blocks_used,
        line.num_waiting,
        line.num_running,
        line.sampled_rows,
        line.predicted,
        line.drafts,
        line.accepted,
    )


def _request(line: RequestLine) -> RequestRecord:
    return RequestRecord(
        line.request,
        line.prompt_tokens,
        line.arrival,
        line.token_times,
        line.first_dispatched,
        line.finished,
        line.finish_reason,
        line.preemptions,
        line.cached_tokens,
        line.kv_transfer,
        line.user,
    )
