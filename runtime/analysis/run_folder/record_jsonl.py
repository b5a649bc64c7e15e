"""`record.jsonl.gz`: a run's record except its spans and stage times.

It has one line for the run, and one per fault, per micro-batch with its waits, and per request with its token times.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import asdict

from ...core.request_record import RequestRecord
from ...core.run_record import (
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
from ...core.stage_floor import StageFloor


class RunLine(msgspec.Struct, array_like=True, tag="run"):
    """The first line."""

    num_stages: int
    num_blocks: int
    notes: list[str] = []
    batch: int = 0
    depth: int = 0
    unknown: list[Unknown] = []
    window: tuple[float | None, float | None] = (None, None)
    floors: list[StageFloor] = []


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
    earlier_tokens: int = 0
    priority: int = 0


class CrossingLine(RequestLine, array_like=True, tag="crossing"):
    """A `RequestRecord` of `RunRecord.crossing`."""


Line = RunLine | FaultLine | MicroBatchLine | RequestLine | CrossingLine
_CHUNK_FIELDS = attrgetter("request", "start", "tokens")


def record_lines(record: RunRecord, origin: float) -> Iterator[Line]:
    """Yield the run, its faults, micro-batches and requests.

    Times are seconds from `origin`, rounded to nanoseconds.
    """

    def since_origin(seconds: float) -> float:
        return round(seconds - origin, 9)

    def times(of: object, *names: str) -> dict[str, float | None]:
        seconds = {name: getattr(of, name) for name in names}
        return {name: None if value is None else since_origin(value) for name, value in seconds.items()}

    opened, closed = (None if at is None else since_origin(at) for at in record.window)
    yield RunLine(**_values(RunLine, record) | {"window": (opened, closed)})
    for fault in record.faults:
        parts = {part: round(seconds, 9) for part, seconds in fault.parts.items()}
        yield FaultLine(**_values(FaultLine, fault) | times(fault, "since", "detected", "up") | {"parts": parts})
    for m in record.micro_batches:
        own = times(m, "dispatched", "completed") | {
            "chunks": list(map(_CHUNK_FIELDS, m.chunks)),
            "decodes": (m.decodes.requests.tolist(), m.decodes.starts.tolist()),
            "waits": [(since_origin(wait.start), since_origin(wait.end), wait.reason) for wait in m.waits],
            "predicted": m.predicted and [round(seconds, 9) for seconds in m.predicted],
        }
        yield MicroBatchLine(**_values(MicroBatchLine, m) | own)
    kinds = [*((RequestLine, r) for r in record.requests), *((CrossingLine, r) for r in record.crossing)]
    for kind, r in kinds:
        own = times(r, "arrival", "first_dispatched", "finished") | {
            "token_times": np.round(np.array(r.token_times, np.float64) - origin, 9).tolist(),
            "kv_transfer": r.kv_transfer and tuple(map(since_origin, r.kv_transfer)),
        }
        yield kind(**_values(kind, r) | own)


def _values(line: type[Line], of: object) -> dict[str, Any]:
    """Return the attributes of a record that a line has fields for."""
    return {name: getattr(of, name) for name in line.__struct_fields__}


def read_record(lines: Iterable[bytes]) -> RunRecord:
    """Return the record in these lines: everything except spans and stage times.

    Raises:
        ValueError: a line is invalid, or the first is not the run's (msgspec's errors are `ValueError` too).
    """
    decode = msgspec.json.Decoder(Line).decode
    record: RunRecord | None = None
    for text in lines:
        line = decode(text)
        if isinstance(line, RunLine):
            record = RunRecord(**asdict(line))
        elif record is None:
            raise ValueError("its first line is not the run's")
        elif isinstance(line, FaultLine):
            record.faults.append(FaultRecord(**asdict(line)))
        elif isinstance(line, MicroBatchLine):
            record.micro_batches.append(_micro_batch(line))
        else:
            requests = record.crossing if isinstance(line, CrossingLine) else record.requests
            requests.append(RequestRecord(**asdict(line)))
    if record is None:
        raise ValueError("it is empty")
    return record


def _micro_batch(line: MicroBatchLine) -> MicroBatchRecord:
    own = {
        "chunks": [SegmentRecord(*part) for part in line.chunks],
        "decodes": DecodesRecord.at(*line.decodes),
        "waits": [Wait(*wait) for wait in line.waits],
    }
    return MicroBatchRecord(**asdict(line) | own)
