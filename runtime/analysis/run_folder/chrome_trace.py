"""Writes a run as a Chrome trace for Perfetto: one track per stage, one for the coordinator, and counters.

Arrows (flow events) connect a micro-batch's slices from stage to stage. A slice is named by its kind; details are in
its arguments.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ...core.micro_batch_columns import Floats
from ...core.run_record import RunRecord
from ..ledger.causes import CAUSES, Cause
from ..ledger.ledger import Ledger
from .files import batches, gzip_file

MAX_SLICES = 200_000  # compute slices; longer runs are truncated, since viewers become slow
_EVENTS_AT_ONCE = 1 << 12
_PROCESS = 1  # viewers treat 0 as the machine's idle process
_KINDS = {(True, True): "mixed", (True, False): "prefill", (False, True): "decode", (False, False): "empty"}
# Reserved colour names of the trace format, closest to the report's colours.
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

Event = dict[str, Any]


def write_trace(path: Path, record: RunRecord, ledger: Ledger, *, title: str = "gapless") -> None:
    """Write `path`, a gzipped Chrome trace (JSON object format, times in microseconds from the run's start)."""
    trace, encode = _Trace(record, ledger), msgspec.json.Encoder().encode
    about = {"title": title, "time_zero": "the run's start", **trace.about}
    with gzip_file(path) as file:
        file.write(b'{"displayTimeUnit":"ms","otherData":%b,"traceEvents":[' % encode(about))
        between = b"\n"
        for events in batches(trace.events(title), _EVENTS_AT_ONCE):
            file.write(between + b",\n".join(map(encode, events)))
            between = b",\n"
        file.write(b"\n]}\n")


class _Trace:
    """The events of a run, up to micro-batch number `last`; infinity: all."""

    def __init__(self, record: RunRecord, ledger: Ledger) -> None:
        self.record, self.ledger = record, ledger
        self.coordinator = record.num_stages + 1  # its track; tracks count from 1
        columns, num = ledger.micro_batches, len(record.micro_batches)
        shown = columns.by_number[: max(1, MAX_SLICES // max(1, record.num_stages))].tolist()
        self.shown = [record.micro_batches[place] for place in shown]
        self.last = math.inf if len(shown) == num else int(columns.micro_batch[shown[-1]])
        self.about: Event = {"stages": record.num_stages, "micro_batches": num, "micro_batches_shown": len(shown)}
        if self.last < math.inf:
            self.about["cut"] = f"the first {len(shown)} of {num} micro-batches; spans.csv.gz has all"

    def events(self, title: str) -> Iterator[Event]:
        """Yield all events."""
        yield {"ph": "M", "pid": _PROCESS, "name": "process_name", "args": {"name": title}}
        for track in range(1, self.coordinator + 1):
            label = f"stage {track - 1}" if track < self.coordinator else "coordinator"
            named = {"ph": "M", "pid": _PROCESS, "tid": track}
            yield {**named, "name": "thread_name", "args": {"name": label}}
            yield {**named, "name": "thread_sort_index", "args": {"sort_index": track}}
        yield from self._computes()
        yield from self._idle()
        for micro_batch in self.shown:
            event = {"pid": _PROCESS, "tid": self.coordinator, "ph": "i", "s": "t", "name": "dispatch"}
            yield {**event, "ts": self._time(micro_batch.dispatched), "args": {"step": micro_batch.micro_batch}}
        yield from self._waits()
        yield from self._marks()
        yield from self._counter("KV blocks", {"used": "kv_blocks_used"})
        yield from self._counter("requests", {"waiting": "num_waiting", "running": "num_running"})

    def _time(self, seconds: float) -> float:
        """Return the microseconds from the run's start; earlier times, as of the wait for a request, become 0."""
        return round(1e6 * max(0.0, seconds - self.ledger.t0), 3)

    def _slices(self, start: Floats, end: Floats) -> tuple[list[float], list[float]]:
        """Return the starts and durations of slices, in microseconds."""
        begin, until = (np.round(1e6 * np.maximum(0.0, times - self.ledger.t0), 3) for times in (start, end))
        return begin.tolist(), np.round(np.maximum(0.0, until - begin), 3).tolist()

    def _computes(self) -> Iterator[Event]:
        """Yield the compute slices of all stages and the arrows between them, by micro-batch.

        This order keeps the text that stages share close together, so that gzip compresses it. An arrow's end binds to
        the slice that begins at its time.
        """
        on: dict[int, list[tuple[int, float, float]]] = {}  # by micro-batch: each stage, begin and length
        for stage, lane in enumerate(self.ledger.lanes):
            is_shown = lane.micro_batch <= self.last
            times = self._slices(lane.begin[is_shown], lane.end[is_shown])
            for number, begin, length in zip(lane.micro_batch[is_shown].tolist(), *times, strict=True):
                on.setdefault(number, []).append((stage, begin, length))
        numbers, columns = sorted(on), self.ledger.micro_batches
        for number, place in zip(numbers, columns.places(np.array(numbers, np.int64)).tolist(), strict=True):
            kind, about = self._about_micro_batch(number, place)
            last = len(on[number]) - 1
            for at, (stage, begin, length) in enumerate(on[number]):
                track = {"pid": _PROCESS, "tid": stage + 1}
                yield {**track, "cat": "compute", "name": kind, "ph": "X", "ts": begin, "dur": length, "args": about}
                if last:
                    phase = "s" if at == 0 else "f" if at == last else "t"
                    flow = {"cat": "flow", "name": "micro-batch", "bp": "e", "ph": phase, "id": number + 1, "ts": begin}
                    yield {**track, **flow}

    def _about_micro_batch(self, number: int, place: int) -> tuple[str, msgspec.Raw]:
        """Return a micro-batch's kind, and its sizes and requests as JSON for the viewer."""
        if place < 0:
            return "no record", msgspec.Raw(b'{"step":%d}' % number)
        columns, micro_batch = self.ledger.micro_batches, self.record.micro_batches[place]
        prefill, decodes = int(columns.prefill[place]), int(columns.decodes[place])
        contents = {
            "step": number,
            "prefill_tokens": prefill,
            "decode_tokens": decodes,
            "decode_context": int(columns.context[place]),
            "chunks": ", ".join([f"request {c.request} [{c.start}:{c.start + c.tokens}]" for c in micro_batch.chunks]),
            "decodes": _names(micro_batch.decodes.distinct),
        }
        return _KINDS[prefill > 0, decodes > 0], msgspec.Raw(msgspec.json.encode(contents))

    def _idle(self) -> Iterator[Event]:
        """Yield the slices of idle intervals before the shown micro-batches; all if the trace is not cut."""
        for stage, (lane, idle) in enumerate(zip(self.ledger.lanes, self.ledger.idle_columns, strict=True)):
            awaited = [*lane.micro_batch.tolist(), None]  # index -1 gives None
            times = self._slices(idle.start, idle.end)
            for code, place, begin, length in zip(idle.cause.tolist(), idle.place.tolist(), *times, strict=True):
                step, cause = awaited[place], CAUSES[code]
                if (math.inf if step is None else step) <= self.last:
                    event = {"pid": _PROCESS, "tid": stage + 1, "cat": "idle", "name": cause, "ph": "X", "ts": begin}
                    yield {**event, "dur": length, "args": {"awaited_step": step}, "cname": _COLOURS[cause]}

    def _waits(self) -> Iterator[Event]:
        """Yield the coordinator's waits, clipped so that they do not overlap."""
        waits = [(w.start, w.end, w.reason, m.micro_batch) for m in self.shown for w in m.waits]
        over = 0.0
        for start, end, reason, step in sorted(waits, key=itemgetter(0, 1)):
            begin, until = max(over, self._time(start)), self._time(end)
            if until > begin:
                event = {"pid": _PROCESS, "tid": self.coordinator, "cat": "wait", "name": reason, "ph": "X"}
                yield {**event, "ts": begin, "dur": round(until - begin, 3), "args": {"step": step}}
            over = max(over, until)

    def _marks(self) -> Iterator[Event]:
        """Yield marks over all tracks: when faults were detected, when all stages ran again, and the trace's cut."""
        until = [
            float(lane.end[lane.micro_batch <= self.last].max(initial=self.ledger.t0)) for lane in self.ledger.lanes
        ]
        end = max(until) if self.last < math.inf else math.inf
        mark = {"ph": "i", "s": "g", "pid": _PROCESS, "tid": self.coordinator}
        for fault in self.record.faults:
            about: Event = {"fault": fault.text, "requests again": fault.requests, "tokens again": fault.tokens}
            named = {**mark, "name": f"fault ({fault.reason})", "cat": "fault"}
            if fault.detected <= end:
                yield {**named, "ts": self._time(fault.detected), "args": about}
            if fault.up is not None and fault.up <= end:
                about = {"epoch": fault.epoch, **fault.parts}
                yield {**named, "name": "recovered", "ts": self._time(fault.up), "args": about}
        if self.last < math.inf:
            cut = self.about["cut"]
            yield {**mark, "name": "trace cut here", "ts": self._time(end), "args": {"cut": cut}}
            yield {"ph": "M", "pid": _PROCESS, "name": "process_labels", "args": {"labels": cut}}

    def _counter(self, name: str, fields: dict[str, str]) -> Iterator[Event]:
        """Yield an event whenever one of these micro-batch fields, by label, changes."""
        before: Event = {}
        for micro_batch in self.shown:
            values = {label: getattr(micro_batch, field) for label, field in fields.items()}
            if values != before:
                time = self._time(micro_batch.dispatched)
                yield {"pid": _PROCESS, "ph": "C", "name": name, "ts": time, "args": values}
            before = values


@lru_cache(maxsize=64)  # the same requests decode in many micro-batches
def _names(requests: tuple[int, ...]) -> str:
    return " ".join(map(str, requests))
