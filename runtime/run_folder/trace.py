"""Writes a run as a Chrome trace, which opens in Perfetto: a track a stage, one for the coordinator, and counters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np

from ..core.micro_batch_columns import Floats, Ints, MicroBatchColumns, values_at
from ..core.run_record import Blocked, MicroBatchRecord, RunRecord
from ..ledger.causes import CAUSES, Cause
from ..ledger.idle import IdleColumns
from ..ledger.lanes import Lane
from ..ledger.ledger import Ledger
from .gzip_stream import GzipStream
from .text_columns import Bools, Cells, decimals, integers, joined, nanoseconds, text_by_code, text_cells, text_where

MAX_SLICES = 200_000  # compute slices. Viewers grow slow beyond it: a longer run's trace ends with that many
_EVENTS_AT_ONCE = 1 << 13
_LONG_EVENTS_AT_ONCE = 1 << 9  # events that may list hundreds of requests
_WAIT_REASONS = get_args(Blocked)
# The reserved colour names of the trace format that are nearest to the report's colours.
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
        for stage, (lane, idle) in enumerate(zip(ledger.lanes, ledger.idle_columns, strict=True)):
            place = micro_batches.places(lane.micro_batch)
            is_shown = np.full(len(place), True)
            if is_cut:
                is_shown = (place >= 0) & (lane.micro_batch <= micro_batches.micro_batch[shown[-1]])
            for rows in _blocks(np.flatnonzero(is_shown), _LONG_EVENTS_AT_ONCE if stage == 0 else _EVENTS_AT_ONCE):
                file.write(_compute(record, ledger, stage, lane, place, rows))
            is_shown = np.append(is_shown, not is_cut)[idle.place]
            for rows in _blocks(np.flatnonzero(is_shown)):
                file.write(_idle(ledger, stage, lane, idle, rows))
        for rows in _blocks(shown):
            file.write(_coordinator(record, ledger, rows))
        file.write(_counter("KV blocks", ledger, shown, {"used": 0}))
        file.write(_counter("requests", ledger, shown, {"waiting": 2, "running": 1}))
        file.write(b"\n]}\n")


def slice_names(micro_batches: MicroBatchColumns, places: Ints) -> list[Cells]:
    """What these micro-batches hold, as in `chunk 246 + 10 decodes`; a place of -1 is one without a record."""
    chunks, prefill, decodes = (
        values_at(column, places) for column in (micro_batches.chunks, micro_batches.prefill, micro_batches.decodes)
    )
    return [
        integers(chunks, chunks > 1),
        text_by_code(np.select([chunks == 1, chunks > 1], [0, 1], -1), ["chunk ", " chunks "]),
        integers(prefill, chunks > 0),
        text_where((chunks > 0) & (decodes > 0), " + "),
        integers(decodes, decodes > 0),
        text_by_code(np.select([decodes == 1, decodes > 1], [0, 1], -1), [" decode", " decodes"]),
        text_where((places >= 0) & (chunks == 0) & (decodes == 0), "empty"),
        text_where(places < 0, "micro-batch"),
    ]


def _blocks(rows: Ints, size: int = _EVENTS_AT_ONCE) -> Iterator[Ints]:
    for first in range(0, len(rows), size):
        yield rows[first : first + size]


def _tracks(num_stages: int, num_shown: int, num_micro_batches: int, title: str) -> Iterator[dict[str, Any]]:
    """The events that name the process and its tracks."""
    is_cut = num_shown < num_micro_batches
    name = f"{title} (first {num_shown} of {num_micro_batches} micro-batches)" if is_cut else title
    yield {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": name}}
    for track in range(num_stages + 1):
        label = "coordinator" if track == num_stages else f"stage {track}"
        yield {"ph": "M", "pid": 0, "tid": track, "name": "thread_name", "args": {"name": label}}
        yield {"ph": "M", "pid": 0, "tid": track, "name": "thread_sort_index", "args": {"sort_index": track}}


def _events(*pieces: Cells | bytes) -> bytes:
    """Events of one kind, each behind a comma; `pieces` are their JSON after the process."""
    return joined([b',\n{"pid":0,', *pieces, b"}"])


def _slices(ledger: Ledger, start: Floats, end: Floats) -> list[Cells | bytes]:
    """The JSON of when slices begin and how long they last, in microseconds."""
    begin = nanoseconds(start - ledger.t0)
    length = (nanoseconds(end - ledger.t0) - begin).clip(min=0)
    return [b'"ph":"X","ts":', decimals(begin, 3), b',"dur":', decimals(length, 3)]


def _compute(record: RunRecord, ledger: Ledger, stage: int, lane: Lane, place: Ints, rows: Ints) -> bytes:
    """The compute slices of these rows of a lane; `place`: of each of its micro-batches in the record."""
    arguments: list[Cells | bytes] = [b'{"step":', integers(lane.micro_batch[rows]), b"}"]
    if stage == 0:
        # Only the first stage lists the requests of a micro-batch: on each stage they would be most of the file.
        numbers = zip(place[rows].tolist(), lane.micro_batch[rows].tolist(), strict=True)
        full = [_contents(record.micro_batches[at]) if at >= 0 else {"step": number} for at, number in numbers]
        arguments = [text_cells(list(map(msgspec.json.encode, full)))]
    return _events(
        b'"tid":%d,"cat":"compute","name":"' % stage, *slice_names(ledger.micro_batches, place[rows]), b'",',
        *_slices(ledger, lane.begin[rows], lane.end[rows]), b',"args":', *arguments,
    )  # fmt: skip


def _idle(ledger: Ledger, stage: int, lane: Lane, idle: IdleColumns, rows: Ints) -> bytes:
    """The slices of these idle intervals of a stage."""
    place, cause = idle.place[rows], idle.cause[rows]
    return _events(
        b'"tid":%d,"cat":"idle","name":"' % stage, text_by_code(cause, CAUSES), b'",',
        *_slices(ledger, idle.start[rows], idle.end[rows]),
        b',"args":{"awaited_step":', integers(values_at(lane.micro_batch, place), place >= 0),
        text_where(place < 0, "null"), b'},"cname":"', text_by_code(cause, [_COLOURS[cause] for cause in CAUSES]), b'"',
    )  # fmt: skip


def _coordinator(record: RunRecord, ledger: Ledger, rows: Ints) -> bytes:
    """The dispatches of these micro-batches, and the coordinator's waits before them."""
    track, micro_batches = b'"tid":%d,' % record.num_stages, ledger.micro_batches
    dispatches = _events(
        track, b'"ph":"i","s":"t","name":"dispatch ', integers(micro_batches.micro_batch[rows]), b'","ts":',
        decimals(nanoseconds(micro_batches.dispatched[rows] - ledger.t0), 3),
    )  # fmt: skip
    waits = [(wait, m.micro_batch) for m in map(record.micro_batches.__getitem__, rows.tolist()) for wait in m.waits]
    waits = [(wait, micro_batch) for wait, micro_batch in waits if wait.end > wait.start]
    reasons = np.array([_WAIT_REASONS.index(wait.reason) for wait, _ in waits], np.int64)
    start, end = np.array([(wait.start, wait.end) for wait, _ in waits], np.float64).reshape(-1, 2).T
    return dispatches + _events(
        track, b'"cat":"wait","name":"', text_by_code(reasons, _WAIT_REASONS), b'",', *_slices(ledger, start, end),
        b',"args":{"step":', integers(np.array([micro_batch for _, micro_batch in waits], np.int64)), b"}",
    )  # fmt: skip


def _counter(name: str, ledger: Ledger, shown: Ints, columns: dict[str, int]) -> bytes:
    """An event wherever one of these columns of `MicroBatchColumns.counters`, by label, changes."""
    values = ledger.micro_batches.counters[shown][:, list(columns.values())]
    changed: Bools = np.any(np.diff(values, axis=0, prepend=-1), axis=1)
    arguments: list[Cells | bytes] = []
    for label, column in zip(columns, values[changed].T, strict=True):
        arguments += [b'%s"%s":' % (b"," * bool(arguments), label.encode()), integers(column)]
    return _events(
        b'"ph":"C","name":"%s","ts":' % name.encode(),
        decimals(nanoseconds(ledger.micro_batches.dispatched[shown[changed]] - ledger.t0), 3),
        b',"args":{', *arguments, b"}",
    )  # fmt: skip


def _contents(micro_batch: MicroBatchRecord) -> dict[str, Any]:
    """The sizes and requests of a micro-batch, as the viewer shows them."""
    decodes = zip(micro_batch.decodes.requests, micro_batch.decodes.starts, strict=True)
    return {
        "step": micro_batch.micro_batch,
        "prefill_tokens": micro_batch.prefill_tokens,
        "decode_tokens": micro_batch.decode_tokens,
        "decode_context": micro_batch.decode_context,
        "chunks": ", ".join([f"request {c.request} [{c.start}:{c.start + c.tokens}]" for c in micro_batch.chunks]),
        "decodes": ", ".join([f"request {request} at {start}" for request, start in decodes]),
    }
