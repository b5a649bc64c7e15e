"""Writes a run as a Chrome trace, which opens in Perfetto: a track a stage, one for the coordinator, and counters.

Arrows (flow events) lead a micro-batch from stage to stage. A slice is named by its kind; its arguments say the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np

from ..core.micro_batch_columns import Floats, Ints, MicroBatchColumns, values_at
from ..core.run_record import Blocked, RunRecord
from ..ledger.causes import CAUSES, Cause
from ..ledger.idle import IdleColumns
from ..ledger.lanes import Lane
from ..ledger.ledger import Ledger
from .files import gzip_file
from .text_columns import Bools, Cells, decimals, integers, joined, nanoseconds, text_by_code, text_cells, text_where

MAX_SLICES = 200_000  # compute slices. Viewers grow slow beyond it: a longer run's trace ends with that many
_EVENTS_AT_ONCE = 1 << 13
_MICRO_BATCHES_AT_ONCE = 1 << 8  # each may list hundreds of requests, on every stage
_PROCESS = 1  # viewers take 0 for the idle process of the machine
_WAIT_REASONS = get_args(Blocked)
_KINDS = ("prefill", "decode", "mixed", "empty", "no record")  # of a micro-batch, by what it holds
# The reserved colour names of the trace format that are nearest to the report's colours.
_COLOURS = {
    Cause.PB1_PREFILL_SIZE: "bad",
    Cause.PB2_PREFILL_DECODE: "terrible",
    Cause.PB3_DECODE_CONTEXT: "yellow",
    Cause.STAGE_IMBALANCE: "olive",
    Cause.TRANSPORT: "thread_state_iowait",
    Cause.CONTROL: "thread_state_uninterruptible",
    Cause.CONTENTION: "thread_state_runnable",
    Cause.STARVED_NO_REQUEST: "white",
    Cause.STARVED_IN_FLIGHT: "grey",
    Cause.STARVED_KV_FULL: "black",
    Cause.UNKNOWN: "generic_work",
    Cause.RECOVERY: "cq_build_failed",
    Cause.FILL_DRAIN: "white",
}


def write_trace(path: Path, record: RunRecord, ledger: Ledger, *, title: str = "gapless") -> None:
    """Write `path`, a gzipped Chrome trace (JSON object format, times in microseconds from the run's start)."""
    micro_batches = ledger.micro_batches
    shown = micro_batches.by_number[: max(1, MAX_SLICES // max(1, record.num_stages))]
    is_cut = len(shown) < len(micro_batches.micro_batch)
    last = int(micro_batches.micro_batch[shown[-1]]) if is_cut else None
    with gzip_file(path) as file:
        about = msgspec.json.encode(_about(record, len(shown), title))
        named = b",\n".join(map(msgspec.json.encode, _tracks(record.num_stages, title)))
        file.write(b'{"displayTimeUnit":"ms","otherData":%b,"traceEvents":[\n%b' % (about, named))
        for events in _computes(record, ledger, last):
            file.write(events)
        for stage, (lane, idle) in enumerate(zip(ledger.lanes, ledger.idle_columns, strict=True)):
            is_shown = np.append(_until(lane, last), last is None)[idle.place]
            for rows in _blocks(np.flatnonzero(is_shown)):
                file.write(_idle(ledger, stage, lane, idle, rows))
        for rows in _blocks(shown):
            file.write(_dispatches(record, ledger, rows))
        for events in _waits(record, ledger, shown):
            file.write(events)
        file.write(_faults(record, ledger, last))
        file.write(_counter("KV blocks", ledger, shown, {"used": 0}))
        file.write(_counter("requests", ledger, shown, {"waiting": 2, "running": 1}))
        if last is not None:
            file.write(_cut(record, ledger, last))
        file.write(b"\n]}\n")


def _about(record: RunRecord, num_shown: int, title: str) -> dict[str, Any]:
    """Return what the file says of itself, and whether it holds the whole run."""
    num_micro_batches = len(record.micro_batches)
    cut = {} if num_shown == num_micro_batches else {"cut": _cut_text(num_shown, num_micro_batches)}
    counts = {"stages": record.num_stages, "micro_batches": num_micro_batches, "micro_batches_shown": num_shown}
    return {"title": title, "time_zero": "the run's start"} | counts | cut


def _cut_text(num_shown: int, num_micro_batches: int) -> str:
    return f"the first {num_shown} of {num_micro_batches} micro-batches; spans.csv.gz holds them all"


def _cut(record: RunRecord, ledger: Ledger, last: int) -> bytes:
    """Mark where the trace ends before the run does: over all tracks, and as a label of the process."""
    end = _end(ledger, last)
    shown = int(np.count_nonzero(ledger.micro_batches.micro_batch <= last))
    text = _cut_text(shown, len(record.micro_batches))
    mark = _mark(record, ledger, end, {"name": "trace cut here"}, {"cut": text})
    label = {"ph": "M", "pid": _PROCESS, "name": "process_labels", "args": {"labels": text}}
    return b"".join([b",\n" + msgspec.json.encode(event) for event in (mark, label)])


def _faults(record: RunRecord, ledger: Ledger, last: int | None) -> bytes:
    """Return the marks over all tracks where a fault was noticed, and where all stages stood again."""
    marks: list[tuple[float, str, dict[str, Any]]] = []
    for fault in record.faults:
        about: dict[str, Any] = {"fault": fault.text, "requests again": fault.requests, "tokens again": fault.tokens}
        marks.append((fault.detected, f"fault ({fault.reason})", about))
        if fault.up is not None:
            marks.append((fault.up, "recovered", {"epoch": fault.epoch, **fault.parts}))
    end = float("inf") if last is None else _end(ledger, last)
    found = [_mark(record, ledger, at, {"name": name, "cat": "fault"}, about) for at, name, about in marks if at <= end]
    return b"".join([b",\n" + msgspec.json.encode(event) for event in found])


def _mark(record: RunRecord, ledger: Ledger, at: float, what: dict[str, str], about: dict[str, Any]) -> dict[str, Any]:
    """Return a mark over all tracks, on the coordinator's."""
    track = {"ph": "i", "s": "g", "pid": _PROCESS, "tid": record.num_stages + 1}
    return {**track, **what, "ts": round(1e6 * max(0.0, at - ledger.t0), 3), "args": about}


def _end(ledger: Ledger, last: int) -> float:
    """Return when the last of the micro-batches up to number `last` ended."""
    return max(float(lane.end[_until(lane, last)].max(initial=ledger.t0)) for lane in ledger.lanes)


def _until(lane: Lane, last: int | None) -> Bools:
    """Return which micro-batches of a lane are shown: up to number `last`; None: all."""
    return np.full(len(lane.micro_batch), True) if last is None else lane.micro_batch <= last


def _blocks(rows: Ints, size: int = _EVENTS_AT_ONCE) -> Iterator[Ints]:
    for first in range(0, len(rows), size):
        yield rows[first : first + size]


def _tracks(num_stages: int, title: str) -> Iterator[dict[str, Any]]:
    """Yield the events that name the process and its tracks, which count from 1."""
    yield {"ph": "M", "pid": _PROCESS, "name": "process_name", "args": {"name": title}}
    for track in range(1, num_stages + 2):
        label = f"stage {track - 1}" if track <= num_stages else "coordinator"
        yield {"ph": "M", "pid": _PROCESS, "tid": track, "name": "thread_name", "args": {"name": label}}
        yield {"ph": "M", "pid": _PROCESS, "tid": track, "name": "thread_sort_index", "args": {"sort_index": track}}


def _events(*pieces: Cells | bytes) -> bytes:
    """Return the events of one kind, each behind a comma; `pieces` are their JSON after the process."""
    return joined([b',\n{"pid":%d,' % _PROCESS, *pieces, b"}"])


def _since_start(ledger: Ledger, seconds: Floats) -> Ints:
    """Return the nanoseconds from the run's start. What was before it, as the wait for a request, is cut off."""
    return nanoseconds(seconds - ledger.t0).clip(min=0)


def _slices(ledger: Ledger, start: Floats, end: Floats) -> list[Cells | bytes]:
    """Return the JSON of when slices begin and how long they last, in microseconds."""
    begin = _since_start(ledger, start)
    length = (_since_start(ledger, end) - begin).clip(min=0)
    return [b'"ph":"X","ts":', decimals(begin, 3), b',"dur":', decimals(length, 3)]


def _computes(record: RunRecord, ledger: Ledger, last: int | None) -> Iterator[bytes]:
    """Yield the compute slices of all stages with the arrows between them, micro-batch after micro-batch.

    What the stages share lies close together then, where gzip finds it again.
    """
    lanes = ledger.lanes
    numbers = np.unique(np.concatenate([lane.micro_batch[_until(lane, last)] for lane in lanes]))
    stages = np.full((2, int(max([int(lane.row.max(initial=-1)) for lane in lanes])) + 1), -1)  # the first, the last
    for stage, lane in reversed(list(enumerate(lanes))):
        stages[0, lane.row] = stage
        stages[1, lane.row] = np.maximum(stages[1, lane.row], stage)
    orders = [np.argsort(lane.micro_batch, kind="stable") for lane in lanes]
    columns = ledger.micro_batches
    for block in _blocks(numbers, _MICRO_BATCHES_AT_ONCE):
        place = columns.places(block)
        sizes = [values_at(size, place) for size in (columns.prefill, columns.decodes, columns.context)]
        each = np.stack([place, block, *sizes], axis=1).tolist()
        arguments = text_cells([_arguments(record, *of_it) for of_it in each])
        kinds = text_by_code(_kinds(columns, place), _KINDS)
        for stage, (lane, order) in enumerate(zip(lanes, orders, strict=True)):
            first, end = np.searchsorted(lane.micro_batch, [block[0], block[-1] + 1], sorter=order)
            rows = order[first:end]
            at = np.searchsorted(block, lane.micro_batch[rows])
            yield _events(
                b'"tid":%d,"cat":"compute","name":"' % (stage + 1),
                kinds[at],
                b'",',
                *_slices(ledger, lane.begin[rows], lane.end[rows]),
                b',"args":',
                arguments[at],
            )
            starts, ends = stages[:, lane.row[rows]]
            flows = starts < ends
            yield _flow(ledger, stage, lane, rows[flows], starts[flows], ends[flows])


def _flow(ledger: Ledger, stage: int, lane: Lane, rows: Ints, first: Ints, last: Ints) -> bytes:
    """Return the ends of arrows at these slices of a stage; they bind to the slice that begins where they are.

    `first` and `last` are the first and the last stage of each slice's micro-batch.
    """
    phase = np.select([first == stage, last == stage], [0, 1], 2)
    return _events(
        b'"tid":%d,"cat":"flow","name":"micro-batch","bp":"e","ph":"' % (stage + 1),
        text_by_code(phase, "sft"),
        b'","id":',
        integers(lane.micro_batch[rows] + 1),
        b',"ts":',
        decimals(_since_start(ledger, lane.begin[rows]), 3),
    )


def _idle(ledger: Ledger, stage: int, lane: Lane, idle: IdleColumns, rows: Ints) -> bytes:
    """Return the slices of these idle intervals of a stage."""
    place, cause = idle.place[rows], idle.cause[rows]
    return _events(
        b'"tid":%d,"cat":"idle","name":"' % (stage + 1),
        text_by_code(cause, CAUSES),
        b'",',
        *_slices(ledger, idle.start[rows], idle.end[rows]),
        b',"args":{"awaited_step":',
        integers(values_at(lane.micro_batch, place), place >= 0),
        text_where(place < 0, "null"),
        b'},"cname":"',
        text_by_code(cause, [_COLOURS[cause] for cause in CAUSES]),
        b'"',
    )


def _dispatches(record: RunRecord, ledger: Ledger, rows: Ints) -> bytes:
    """Return a mark on the coordinator's track for each dispatch of these micro-batches."""
    micro_batches = ledger.micro_batches
    return _events(
        b'"tid":%d,"ph":"i","s":"t","name":"dispatch","ts":' % (record.num_stages + 1),
        decimals(_since_start(ledger, micro_batches.dispatched[rows]), 3),
        b',"args":{"step":',
        integers(micro_batches.micro_batch[rows]),
        b"}",
    )


def _waits(record: RunRecord, ledger: Ledger, shown: Ints) -> Iterator[bytes]:
    """Yield the coordinator's waits before these micro-batches.

    A wait begins where the one before it ends, or later.
    """
    waits = [(wait, m.micro_batch) for m in map(record.micro_batches.__getitem__, shown.tolist()) for wait in m.waits]
    start, end = np.array([(wait.start, wait.end) for wait, _ in waits], np.float64).reshape(-1, 2).T
    step = np.array([micro_batch for _, micro_batch in waits], np.int64)
    reason = np.array([_WAIT_REASONS.index(wait.reason) for wait, _ in waits], np.int64)
    order = np.lexsort((end, start))
    start, end, step, reason = start[order], end[order], step[order], reason[order]
    start[1:] = np.maximum(start[1:], np.maximum.accumulate(end)[:-1])
    is_kept = _since_start(ledger, end) > _since_start(ledger, start)
    for rows in _blocks(np.flatnonzero(is_kept)):
        yield _events(
            b'"tid":%d,"cat":"wait","name":"' % (record.num_stages + 1),
            text_by_code(reason[rows], _WAIT_REASONS),
            b'",',
            *_slices(ledger, start[rows], end[rows]),
            b',"args":{"step":',
            integers(step[rows]),
            b"}",
        )


def _counter(name: str, ledger: Ledger, shown: Ints, columns: dict[str, int]) -> bytes:
    """Return an event wherever one of these columns of `MicroBatchColumns.counters`, by label, changes."""
    values = ledger.micro_batches.counters[shown][:, list(columns.values())]
    changed: Bools = np.any(np.diff(values, axis=0, prepend=-1), axis=1)
    arguments: list[Cells | bytes] = []
    for label, column in zip(columns, values[changed].T, strict=True):
        arguments += [b'%s"%s":' % (b"," * bool(arguments), label.encode()), integers(column)]
    return _events(
        b'"ph":"C","name":"%s","ts":' % name.encode(),
        decimals(_since_start(ledger, ledger.micro_batches.dispatched[shown[changed]]), 3),
        b',"args":{',
        *arguments,
        b"}",
    )


def _kinds(micro_batches: MicroBatchColumns, places: Ints) -> Ints:
    """Return the indices into `_KINDS` of these micro-batches; a place of -1 is one without a record."""
    prefill, decodes = values_at(micro_batches.prefill, places) > 0, values_at(micro_batches.decodes, places) > 0
    return np.select([places < 0, prefill & decodes, prefill, decodes], [4, 2, 0, 1], 3)


def _arguments(record: RunRecord, place: int, number: int, prefill: int, decodes: int, context: int) -> bytes:
    """Return the JSON of a micro-batch's sizes and requests, as the viewer shows them on every stage."""
    if place < 0:
        return b'{"step":%d}' % number
    micro_batch = record.micro_batches[place]
    contents = {
        "step": number,
        "prefill_tokens": prefill,
        "decode_tokens": decodes,
        "decode_context": context,
        "chunks": ", ".join([f"request {c.request} [{c.start}:{c.start + c.tokens}]" for c in micro_batch.chunks]),
        "decodes": _names(micro_batch.decodes.distinct),
    }
    return msgspec.json.encode(contents)


@lru_cache(maxsize=64)  # the same requests decode in one micro-batch after the other
def _names(requests: tuple[int, ...]) -> str:
    return " ".join(map(str, requests))
