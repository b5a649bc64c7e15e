"""A run as a Chrome trace: a track a stage, one for the coordinator, counters; opens in Perfetto."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np

from ..core.micro_batch_columns import Ints, MicroBatchColumns, values_at
from ..core.run_record import Blocked, MicroBatchRecord, RunRecord
from ..ledger.ledger import CAUSES, Cause, Floats, IdleColumns, Lane, Ledger
from .gzip_stream import GzipStream
from .text_columns import Bools, Cells, decimals, integers, joined, names, nanoseconds, texts, where

MAX_SLICES = (
    200_000  # compute slices; viewers grow slow beyond it, so a longer run's trace holds its first micro-batches
)

_ROWS = 1 << 13  # events that are made at once
_TOLD = 1 << 9  # the same of those that name hundreds of requests
_REASONS = get_args(Blocked)
# The trace format's reserved colour names, nearest to the report's colours.
_COLOURS = {
    Cause.PB1_PREFILL_SIZE: "bad",
    Cause.PB2_PREFILL_DECODE: "terrible",
    Cause.PB3_DECODE_CONTEXT: "yellow",
    Cause.STAGE_IMBALANCE: "olive",
    Cause.TRANSPORT: "thread_state_iowait",
    Cause.CONTROL: "thread_state_uninterruptible",
    Cause.STARVED_NO_REQUEST: "white",
    Cause.STARVED_IN_FLIGHT: "grey",
    Cause.STARVED_KV_FULL: "black",
    Cause.FILL_DRAIN: "white",
}


def write_trace(path: Path, record: RunRecord, ledger: Ledger, *, title: str = "gapless") -> None:
    """Write `path`, a gzipped Chrome trace (JSON object format, times in microseconds from the run's start)."""
    micro_batches = ledger.micro_batches
    shown = micro_batches.by_number[: max(1, MAX_SLICES // max(1, record.num_stages))]
    is_cut = len(shown) < len(micro_batches.micro_batch)
    tracks = _tracks(record.num_stages, len(shown), len(micro_batches.micro_batch), title)
    with GzipStream(path) as file:
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n' + b",\n".join(map(msgspec.json.encode, tracks)))
        for stage, (lane, idle) in enumerate(zip(ledger.lanes, ledger.columns, strict=True)):
            place = micro_batches.places(lane.micro_batch)
            kept = (
                (place >= 0) & (lane.micro_batch <= micro_batches.micro_batch[shown[-1]])
                if is_cut
                else np.full(len(place), True)
            )
            for some in _blocks(np.flatnonzero(kept), _TOLD if stage == 0 else _ROWS):
                file.write(_compute(record, ledger, stage, lane, place, some))
            awaited = np.append(kept, not is_cut)[idle.place]
            for some in _blocks(np.flatnonzero(awaited)):
                file.write(_idle(ledger, stage, lane, idle, some))
        for some in _blocks(shown):
            file.write(_coordinator(record, ledger, some))
        file.write(_counter("KV blocks", ledger, shown, {"used": 0}))
        file.write(_counter("requests", ledger, shown, {"waiting": 2, "running": 1}))
        file.write(b"\n]}\n")


def slice_names(micro_batches: MicroBatchColumns, at: Ints) -> list[Cells]:
    """What the micro-batches there are made of, as in `chunk 246 + 10 decodes`; of -1 there is no record."""
    chunks, prefill, decodes = (
        values_at(column, at) for column in (micro_batches.chunks, micro_batches.prefill, micro_batches.decodes)
    )
    return [
        integers(chunks, chunks > 1),
        names(np.select([chunks == 1, chunks > 1], [0, 1], -1), ["chunk ", " chunks "]),
        integers(prefill, chunks > 0),
        where((chunks > 0) & (decodes > 0), " + "),
        integers(decodes, decodes > 0),
        names(np.select([decodes == 1, decodes > 1], [0, 1], -1), [" decode", " decodes"]),
        where((at >= 0) & (chunks == 0) & (decodes == 0), "empty"),
        where(at < 0, "micro-batch"),
    ]


def _blocks(rows: Ints, size: int = _ROWS) -> Iterator[Ints]:
    for at in range(0, len(rows), size):
        yield rows[at : at + size]


def _tracks(num_stages: int, shown: int, micro_batches: int, title: str) -> Iterator[dict[str, Any]]:
    """What the viewer calls them."""
    name = f"{title} (first {shown} of {micro_batches} micro-batches)" if shown < micro_batches else title
    yield {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": name}}
    for track in range(num_stages + 1):
        label = "coordinator" if track == num_stages else f"stage {track}"
        yield {"ph": "M", "pid": 0, "tid": track, "name": "thread_name", "args": {"name": label}}
        yield {"ph": "M", "pid": 0, "tid": track, "name": "thread_sort_index", "args": {"sort_index": track}}


def _event(*pieces: Cells | bytes) -> bytes:
    """Events of one kind, each behind a comma; `pieces` come after the process."""
    return joined([b',\n{"pid":0,', *pieces, b"}"])


def _slices(ledger: Ledger, start: Floats, end: Floats) -> list[Cells | bytes]:
    """Where slices begin and how long they last, in microseconds."""
    begin = nanoseconds(start - ledger.t0)
    length = (nanoseconds(end - ledger.t0) - begin).clip(min=0)
    return [b'"ph":"X","ts":', decimals(begin, 3), b',"dur":', decimals(length, 3)]


def _compute(record: RunRecord, ledger: Ledger, stage: int, lane: Lane, place: Ints, some: Ints) -> bytes:
    micro_batch: list[Cells | bytes] = [b'{"step":', integers(lane.micro_batch[some]), b"}"]
    if stage == 0:
        # Who rides in it is told once, on the first stage: said on each, it would make up most of the file.
        numbers = zip(place[some].tolist(), lane.micro_batch[some].tolist(), strict=True)
        told = [_arguments(record.micro_batches[at]) if at >= 0 else {"step": number} for at, number in numbers]
        micro_batch = [texts(list(map(msgspec.json.encode, told)))]
    return _event(
        b'"tid":%d,"cat":"compute","name":"' % stage, *slice_names(ledger.micro_batches, place[some]), b'",',
        *_slices(ledger, lane.begin[some], lane.end[some]), b',"args":', *micro_batch,
    )  # fmt: skip


def _idle(ledger: Ledger, stage: int, lane: Lane, idle: IdleColumns, some: Ints) -> bytes:
    place, cause = idle.place[some], idle.cause[some]
    return _event(
        b'"tid":%d,"cat":"idle","name":"' % stage, names(cause, CAUSES), b'",',
        *_slices(ledger, idle.start[some], idle.end[some]),
        b',"args":{"awaited_step":', integers(values_at(lane.micro_batch, place), place >= 0), where(place < 0, "null"),
        b'},"cname":"', names(cause, [_COLOURS[cause] for cause in CAUSES]), b'"',
    )  # fmt: skip


def _coordinator(record: RunRecord, ledger: Ledger, some: Ints) -> bytes:
    """Its dispatches, and what it waited for before them."""
    track, micro_batches = b'"tid":%d,' % record.num_stages, ledger.micro_batches
    dispatches = _event(
        track, b'"ph":"i","s":"t","name":"dispatch ', integers(micro_batches.micro_batch[some]), b'","ts":',
        decimals(nanoseconds(micro_batches.dispatched[some] - ledger.t0), 3),
    )  # fmt: skip
    waits = [(wait, m.micro_batch) for m in map(record.micro_batches.__getitem__, some.tolist()) for wait in m.waits]
    waits = [(wait, micro_batch) for wait, micro_batch in waits if wait.end > wait.start]
    reasons = np.array([_REASONS.index(wait.reason) for wait, _ in waits], np.int64)
    start, end = np.array([(wait.start, wait.end) for wait, _ in waits], np.float64).reshape(-1, 2).T
    return dispatches + _event(
        track, b'"cat":"wait","name":"', names(reasons, _REASONS), b'",', *_slices(ledger, start, end),
        b',"args":{"step":', integers(np.array([micro_batch for _, micro_batch in waits], np.int64)), b"}",
    )  # fmt: skip


def _counter(name: str, ledger: Ledger, shown: Ints, columns: dict[str, int]) -> bytes:
    """Where one of the `StepColumns.counters` named changes."""
    values = ledger.micro_batches.counters[shown][:, list(columns.values())]
    changed: Bools = np.any(np.diff(values, axis=0, prepend=-1), axis=1)
    told: list[Cells | bytes] = []
    for label, column in zip(columns, values[changed].T, strict=True):
        told += [b'%s"%s":' % (b"," * bool(told), label.encode()), integers(column)]
    return _event(
        b'"ph":"C","name":"%s","ts":' % name.encode(),
        decimals(nanoseconds(ledger.micro_batches.dispatched[shown[changed]] - ledger.t0), 3),
        b',"args":{',
        *told,
        b"}",
    )  # fmt: skip


def _arguments(micro_batch: MicroBatchRecord) -> dict[str, Any]:
    decodes = zip(micro_batch.decodes.requests, micro_batch.decodes.starts, strict=True)
    return {
        "step": micro_batch.micro_batch,
        "prefill_tokens": micro_batch.prefill_tokens,
        "decode_tokens": micro_batch.decode_tokens,
        "decode_context": micro_batch.decode_context,
        "chunks": ", ".join([f"request {c.request} [{c.start}:{c.start + c.tokens}]" for c in micro_batch.chunks]),
        "decodes": ", ".join([f"request {request} at {start}" for request, start in decodes]),
    }
