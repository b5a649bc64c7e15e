"""Packs a run for its page's timeline into compressed integer columns, which `timeline_columns.js` unpacks."""

from __future__ import annotations

import base64
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...core.micro_batch_columns import Floats, values_at
from ...core.run_record import RunRecord
from ..ledger.ledger import Ledger

MAX_BOXES = 1_000_000  # micro-batches times stages on a page; only the first micro-batches of a longer run are shown
SHORTEST_TICK = 1e-7  # seconds: clocks are no finer
NAMED_REQUESTS = 8  # requests named in a micro-batch's tooltip, those with chunks first
NO_MICRO_BATCH = 0xFFFFFFFF  # row of idle time at the end of a stage, with no micro-batch after it
_LAST_TICK = 2**32 - 2


@dataclass(frozen=True, slots=True)
class TimelineColumns:
    """The packed columns of a run. Times are ticks from the run's start.

    Attributes:
        head: The number of stages, blocks and micro-batches, the layout of the arrays in the buffer, and start and end
            of each fault, if any.
        data: The buffer, deflated and in base64.
        end: The last tick shown.
    """

    head: dict[str, Any]
    data: str
    end: int


def tick_seconds(span_seconds: float) -> float:
    """Return the shortest tick, in seconds, with which a run of `span_seconds` fits into 32 bits."""
    return max(span_seconds / _LAST_TICK, SHORTEST_TICK)


def pack_columns(record: RunRecord, ledger: Ledger, tick: float, max_boxes: int = MAX_BOXES) -> TimelineColumns:
    """Pack a run: micro-batches and idle intervals per stage, and the contents of each micro-batch.

    Args:
        record: The run.
        ledger: Its ledger.
        tick: Length of a tick, in seconds.
        max_boxes: Maximum of micro-batches times stages. If the run has more, its first micro-batches are packed.
    """
    limit = max(1, max_boxes // max(1, ledger.num_stages))
    micro_batches = (
        np.unique(np.concatenate([lane.micro_batch for lane in ledger.lanes]))
        if ledger.lanes
        else np.empty(0, np.int64)
    )
    shown = micro_batches[:limit]
    predictions = {m.micro_batch: m.predicted for m in record.micro_batches if m.predicted}
    arrays: dict[str, npt.NDArray[Any]] = {}

    def ticks(seconds: Floats) -> npt.NDArray[np.uint32]:
        return durations(seconds - ledger.t0)

    def durations(seconds: Floats) -> npt.NDArray[np.uint32]:
        return np.clip(np.round(seconds / tick), 0, _LAST_TICK).astype(np.uint32)

    for stage, (lane, idle) in enumerate(zip(ledger.lanes, ledger.idle_columns, strict=True)):
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
        if predictions:
            predicted = [predictions[m][stage] if m in predictions else 0.0 for m in lane.micro_batch[:count].tolist()]
            arrays[f"predicted{stage}"] = durations(np.array(predicted, np.float64))
    arrays |= _micro_batch_arrays(record, ledger, shown)
    arrays["dispatched"] = ticks(arrays["dispatched"])
    cut = bool(ledger.lanes) and len(shown) < len(micro_batches)
    last = max((int(arrays[f"end{s}"].max(initial=0)) for s in range(ledger.num_stages)), default=0)
    layout, buffer = _lay_out(arrays)
    head = {
        "stages": ledger.num_stages,
        "blocks": record.num_blocks,
        "microBatches": len(micro_batches),
        "shown": len(shown),
        "arrays": layout,
    }
    if record.unknown:
        head["unknown"] = list(record.unknown)
    if record.faults:
        ups = [ledger.t1 if fault.up is None else fault.up for fault in record.faults]
        since, until = ticks(np.array([fault.since for fault in record.faults])), ticks(np.array(ups))
        head["faults"] = [list(pair) for pair in zip(since.tolist(), until.tolist(), strict=True)]
    end = last if cut else round(ledger.span_seconds / tick)
    return TimelineColumns(head, base64.b64encode(zlib.compress(buffer, 6)).decode("ascii"), end)


def _micro_batch_arrays(record: RunRecord, ledger: Ledger, shown: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[Any]]:
    """Return one array per property of the micro-batches `shown`. `dispatched` is in seconds.

    `parts` contains the named requests of all micro-batches; micro-batch i starts at `partsFrom[i]`.
    """
    columns = ledger.micro_batches
    place = columns.places(shown)
    requests: list[int] = []
    offsets = [0]
    for at in place.tolist():
        if at >= 0 and "requests" not in record.unknown:
            micro_batch = record.micro_batches[at]
            named = [part.request for part in micro_batch.chunks[:NAMED_REQUESTS]]
            requests += named
            requests += micro_batch.decodes.distinct[: NAMED_REQUESTS - len(named)]
        offsets.append(len(requests))
    kv, running, waiting = columns.counters.T
    counts = {
        "prefill": columns.prefill,
        "decodes": columns.decodes,
        "context": columns.context,
        "chunks": columns.chunks,
        "kv": kv,
        "running": running,
        "waiting": waiting,
    }
    return {
        "microBatch": shown.astype(np.uint32),
        "dispatched": values_at(columns.dispatched, place),
        **{name: values_at(column, place).astype(np.uint32) for name, column in counts.items()},
        "partsFrom": np.array(offsets, np.uint32),
        "parts": np.array(requests, np.uint32),
    }


def _lay_out(arrays: dict[str, npt.NDArray[Any]]) -> tuple[dict[str, tuple[str, int, int]], bytes]:
    """Pack arrays into one buffer. Return (kind, byte offset, length) by name, and the buffer.

    An array of four-byte integers is stored as four planes: the lowest byte of each value, then the next, and so on. An
    ascending array is stored as differences (kind `d32`). Both make the deflated buffer smaller.
    """
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
