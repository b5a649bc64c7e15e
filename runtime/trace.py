"""A run as a Chrome trace: a track a stage, one for the coordinator, counters; opens in Perfetto."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from .ledger import CAUSES, Cause, Floats, Ledger
from .spans import RunRecord, StepRecord

MAX_SLICES = 200_000  # compute slices; viewers grow slow beyond it, so a longer run's trace holds its first steps

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
    encode = msgspec.json.Encoder().encode
    events = _events(record, ledger, title)
    with gzip.open(path, "wb", compresslevel=2) as file:
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n' + encode(next(events)))
        while batch := list(islice(events, 20_000)):
            file.write(b",\n" + b",\n".join(map(encode, batch)))
        file.write(b"\n]}\n")


def slice_name(step: StepRecord) -> str:
    """What a micro-batch is made of, as in `chunk 246 + 10 decodes`."""
    chunks = {0: "", 1: f"chunk {step.prefill_tokens}"}.get(
        len(step.chunks), f"{len(step.chunks)} chunks {step.prefill_tokens}"
    )
    decodes = {0: "", 1: "1 decode"}.get(step.decode_tokens, f"{step.decode_tokens} decodes")
    return " + ".join(part for part in (chunks, decodes) if part) or "empty"


def _events(record: RunRecord, ledger: Ledger, title: str) -> Iterator[dict[str, Any]]:
    origin, coordinator = ledger.t0, record.num_stages
    steps = sorted(record.steps, key=lambda step: step.step)[: max(1, MAX_SLICES // max(1, record.num_stages))]
    known = {step.step: step for step in steps}
    cut = len(steps) < len(record.steps)

    def at(seconds: float) -> float:
        return round((seconds - origin) * 1e6, 3)

    def slices(start: Floats, end: Floats) -> Iterator[tuple[float, float]]:
        """Where slices begin, and how long they last."""
        begin = np.round((start - origin) * 1e6, 3)
        return zip(begin.tolist(), np.round((end - origin) * 1e6 - begin, 3).clip(min=0.0).tolist(), strict=True)

    def piece(track: int, name: str, kind: str, where: tuple[float, float], args: dict[str, Any]) -> dict[str, Any]:
        begin, length = where
        return {"ph": "X", "pid": 0, "tid": track, "name": name, "cat": kind, "ts": begin, "dur": length, "args": args}

    name = f"{title} (first {len(steps)} of {len(record.steps)} micro-batches)" if cut else title
    yield {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": name}}
    for track in range(record.num_stages + 1):
        label = "coordinator" if track == coordinator else f"stage {track}"
        yield {"ph": "M", "pid": 0, "tid": track, "name": "thread_name", "args": {"name": label}}
        yield {"ph": "M", "pid": 0, "tid": track, "name": "thread_sort_index", "args": {"sort_index": track}}

    names = {step.step: slice_name(step) for step in steps}
    for stage, (lane, idle) in enumerate(zip(ledger.lanes, ledger.columns, strict=True)):
        order = lane.step.tolist()
        for step, where in zip(order, slices(lane.begin, lane.end), strict=True):
            if step in known or not cut:
                # Who rides in it is told once, on the first stage: said on each, it would make up most of the file.
                args = _arguments(known[step]) if stage == 0 and step in known else {"step": step}
                yield piece(stage, names.get(step, "micro-batch"), "compute", where, args)
        columns = zip(idle.cause.tolist(), idle.place.tolist(), slices(idle.start, idle.end), strict=True)
        for code, place, where in columns:
            awaited = order[place] if place >= 0 else None
            if awaited in known or not cut:
                cause = CAUSES[code]
                yield piece(stage, cause.value, "idle", where, {"awaited_step": awaited}) | {"cname": _COLOURS[cause]}

    shown: dict[str, dict[str, int]] = {}
    for step in steps:
        for wait in step.waits:
            if wait.end > wait.start:
                where = at(wait.start), round((wait.end - wait.start) * 1e6, 3)
                yield piece(coordinator, wait.reason, "wait", where, {"step": step.step})
        time = at(step.dispatched)
        yield {"ph": "i", "pid": 0, "tid": coordinator, "name": f"dispatch {step.step}", "ts": time, "s": "t"}
        counters = {
            "KV blocks": {"used": step.kv_blocks_used},
            "requests": {"waiting": step.num_waiting, "running": step.num_running},
        }
        for counter, values in counters.items():
            if shown.get(counter) != values:
                shown[counter] = values
                yield {"ph": "C", "pid": 0, "name": counter, "ts": time, "args": values}


def _arguments(step: StepRecord) -> dict[str, Any]:
    return {
        "step": step.step,
        "prefill_tokens": step.prefill_tokens,
        "decode_tokens": step.decode_tokens,
        "decode_context": step.decode_context,
        "chunks": ", ".join([f"request {c.request} [{c.start}:{c.start + c.tokens}]" for c in step.chunks]),
        "decodes": ", ".join([f"request {d.request} at {d.start}" for d in step.decodes]),
    }
