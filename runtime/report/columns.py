"""The pipeline picture's data: columns of small integers, compressed, that the page's script reads as typed arrays."""

from __future__ import annotations

import base64
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..core.micro_batch_columns import values_at
from ..core.run_record import RunRecord
from ..ledger.ledger import Floats, Ledger

MAX_BOXES = 1_000_000  # micro-batches times stages on a page; a longer run's picture holds its first micro-batches
LEAST_TICK = 1e-7  # seconds; clocks tell no finer
PARTS = 8  # requests named in a micro-batch's tooltip, chunks first
NO_MICRO_BATCH = 0xFFFFFFFF  # awaited after a stage's last micro-batch


@dataclass(frozen=True, slots=True)
class Columns:
    """`data` is base64 of a deflated buffer; `head` tells where in it each array lies. Times are ticks from the run's
    start; `end` is the last one shown.
    """

    head: dict[str, Any]
    data: str
    end: int


def tick_of(span_seconds: float) -> float:
    """The seconds of a tick, so that a run of that span fits into 32 bits."""
    return max(span_seconds / (2**32 - 2), LEAST_TICK)


def pack(record: RunRecord, ledger: Ledger, tick: float, max_boxes: int = MAX_BOXES) -> Columns:
    """Columns of a run in ticks of so many seconds: per stage its boxes and idle intervals, per micro-batch its
    make-up, requests and counters."""
    limit = max(1, max_boxes // max(1, ledger.num_stages))
    micro_batches = (
        np.unique(np.concatenate([lane.micro_batch for lane in ledger.lanes]))
        if ledger.lanes
        else np.empty(0, np.int64)
    )
    shown = micro_batches[:limit]
    foreseen = {m.micro_batch: m.predicted for m in record.micro_batches if m.predicted}
    arrays: dict[str, npt.NDArray[Any]] = {}

    def ticks(seconds: Floats) -> npt.NDArray[np.uint32]:
        return np.clip(np.round((seconds - ledger.t0) / tick), 0, 2**32 - 2).astype(np.uint32)

    def lengths(seconds: Floats) -> npt.NDArray[np.uint32]:
        return np.clip(np.round(seconds / tick), 0, 2**32 - 2).astype(np.uint32)

    for stage, (lane, idle) in enumerate(zip(ledger.lanes, ledger.columns, strict=True)):
        count = int(np.searchsorted(lane.row, limit))
        kept = idle.place < count if count == len(lane.micro_batch) else (idle.place >= 0) & (idle.place < count)
        place = idle.place[kept]
        awaited = (
            np.where(place >= 0, lane.row[place], NO_MICRO_BATCH)
            if len(lane.row)
            else np.full(len(place), NO_MICRO_BATCH)
        )
        arrays |= {
            f"begin{stage}": ticks(lane.begin[:count]),
            f"end{stage}": ticks(lane.end[:count]),
            f"row{stage}": lane.row[:count].astype(np.uint32),
            f"idleStart{stage}": ticks(idle.start[kept]),
            f"idleEnd{stage}": ticks(idle.end[kept]),
            f"idleRow{stage}": awaited.astype(np.uint32),
            f"cause{stage}": idle.cause[kept].astype(np.uint8),
        }
        if foreseen:
            predicted = [foreseen[m][stage] if m in foreseen else 0.0 for m in lane.micro_batch[:count].tolist()]
            arrays[f"predicted{stage}"] = lengths(np.array(predicted, np.float64))
    arrays |= _micro_batches(record, ledger, shown)
    arrays["dispatched"] = ticks(arrays["dispatched"])
    cut = bool(ledger.lanes) and len(shown) < len(micro_batches)
    last = max((int(arrays[f"end{s}"].max(initial=0)) for s in range(ledger.num_stages)), default=0)
    layout, buffer = _lay_out(arrays)
    head = {
        "stages": ledger.num_stages,
        "blocks": record.num_blocks,
        "steps": len(micro_batches),
        "shown": len(shown),
        "arrays": layout,
    }
    end = last if cut else round(ledger.span_seconds / tick)
    return Columns(head, base64.b64encode(zlib.compress(buffer, 6)).decode("ascii"), end)


def _micro_batches(record: RunRecord, ledger: Ledger, shown: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[Any]]:
    made = ledger.micro_batches
    place = made.places(shown)
    requests: list[int] = []
    offsets = [0]
    for at in place.tolist():
        if at >= 0:
            micro_batch = record.micro_batches[at]
            named = [part.request for part in micro_batch.chunks[:PARTS]]
            requests += named + micro_batch.decodes.requests[: PARTS - len(named)].tolist()
        offsets.append(len(requests))
    kv, running, waiting = made.counters.T
    columns = {
        "prefill": made.prefill, "decodes": made.decodes, "context": made.context, "chunks": made.chunks, "kv": kv,
        "running": running, "waiting": waiting,
    }  # fmt: skip
    return {
        "step": shown.astype(np.uint32),
        "dispatched": values_at(made.dispatched, place),
        **{name: values_at(column, place).astype(np.uint32) for name, column in columns.items()},
        "partsFrom": np.array(offsets, np.uint32),
        "parts": np.array(requests, np.uint32),
    }


def _lay_out(arrays: dict[str, npt.NDArray[Any]]) -> tuple[dict[str, tuple[str, int, int]], bytes]:
    """Name -> (kind, byte offset, length), and the buffer. Four-byte columns lie by the planes of their bytes, lowest
    first, and ascending ones (`d32`) as differences: both deflate to less."""
    layout: dict[str, tuple[str, int, int]] = {}
    buffer = bytearray()
    for name, values in arrays.items():
        kind = {4: "u32", 1: "u8"}[values.itemsize]
        if kind == "u32" and len(values) > 1 and bool((values[1:] >= values[:-1]).all()):
            kind, values = "d32", np.diff(values, prepend=values.dtype.type(0))
        layout[name] = kind, len(buffer), len(values)
        planes = values.astype(values.dtype.newbyteorder("<")).view(np.uint8).reshape(-1, values.itemsize)
        buffer += planes.T.tobytes()
    return layout, bytes(buffer)
