"""Idle time due to faults: while a failed pipeline is repaired, each idle second of each stage is `recovery`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from ...core.micro_batch_columns import Floats
from ...core.run_record import FaultRecord, MicroBatchRecord, RunRecord, Wait
from .causes import Cause
from .idle import IdleColumns


def name_recovery(idle: Sequence[IdleColumns], faults: Sequence[FaultRecord]) -> list[IdleColumns]:
    """Return the idle intervals of each stage, split at the start of each fault and at the end of its repair.

    Idle time in between becomes `recovery`; the rest keeps its cause. A fault that was never repaired lasts to the end
    of the run; so does, for a stage that was lost, the fault that removed it.
    """
    return [_cut(columns, _edges(faults, stage)) for stage, columns in enumerate(idle)] if faults else list(idle)


def lost_since(faults: Sequence[FaultRecord], stage: int) -> float:
    """Return the start of the fault that removed a stage; infinity if none did."""
    return min(
        (fault.since for fault in faults if fault.stages is not None and stage >= fault.stages), default=math.inf
    )


def down_seconds(faults: Sequence[FaultRecord], end: float) -> float:
    """Return how long the pipeline was down before `end`, in seconds."""
    edges = np.minimum(_edges(faults), end)
    return float((edges[1::2] - edges[::2]).sum())


def replay_seconds(record: RunRecord) -> list[float]:
    """Return, for each fault, the stage seconds spent recomputing tokens that had been computed before it.

    They are averaged over the stages. A micro-batch counts by its share of recomputed tokens. A token recomputed again
    after a further fault counts for that fault.
    """
    faults = record.faults
    shares: dict[int, dict[int, float]] = {}  # by micro-batch, then by fault
    computed: dict[int, float] = {}  # tokens of each request since the last fault; infinity once it has decoded
    behind: dict[int, tuple[int, float, float]] = {}  # by request: its fault, tokens computed before it, tokens since
    fault = 0
    for micro_batch in record.micro_batches if faults else ():
        while fault < len(faults) and micro_batch.dispatched > faults[fault].detected:
            had = {request: tokens for request, (_, tokens, _) in behind.items()}
            behind |= {r: (fault, max(tokens, had.get(r, 0.0)), 0.0) for r, tokens in computed.items()}
            behind |= {r: (fault, tokens, 0.0) for r, tokens in had.items() if r not in computed}
            computed, fault = {}, fault + 1
        for chunk in micro_batch.chunks:
            end = float(chunk.start + chunk.tokens)
            computed[chunk.request] = max(end, computed.get(chunk.request, 0.0))
            if chunk.request in behind:
                of, tokens, again = behind[chunk.request]
                share = max(0.0, min(end, tokens) - max(chunk.start, again)) / micro_batch.num_tokens
                own = shares.setdefault(micro_batch.micro_batch, {})
                own[of] = own.get(of, 0.0) + share
                behind[chunk.request] = (of, tokens, max(end, again))
        for request in micro_batch.decodes.distinct:
            computed[request] = math.inf
            behind.pop(request, None)
    seconds = [0.0] * len(faults)
    for span in record.spans if shares else ():
        for of, share in shares.get(span.micro_batch, {}).items():
            seconds[of] += share * (span.end - span.begin) / record.num_stages
    return seconds


def fault_summary(fault: FaultRecord, start: float, replay: float | None = None) -> dict[str, Any]:
    """Return a fault's entry in `summary.json`.

    It contains the fault's time in seconds since the run's `start`; its duration and the duration's parts in seconds
    (None, and only the first part, before the repair); and its cost, with the seconds of `replay` if known. `stages` is
    the number of stages left since, None for all.
    """
    return {
        "time": fault.since - start,
        "reason": fault.reason,
        "text": fault.text,
        "seconds": fault.seconds,
        "parts": {"detect": fault.detected - fault.since, **fault.parts},
        "ranks": fault.ranks,
        "stages": fault.stages,
        "requests": fault.requests,
        "tokens": fault.tokens,
        "replay": replay,
    }


def was_dropped(micro_batch: MicroBatchRecord, faults: Sequence[FaultRecord]) -> bool:
    """Return whether a fault dropped it: some stages may have computed it, but its result never arrives."""
    return micro_batch.completed is None and any(micro_batch.dispatched <= fault.detected for fault in faults)


def with_waits_of_dropped(record: RunRecord) -> list[MicroBatchRecord]:
    """Return a record's micro-batches, with the waits of dropped ones moved to the next micro-batch.

    This applies to dropped micro-batches that stage 0 did not compute.
    """
    micro_batches = record.micro_batches
    if not record.faults:
        return micro_batches
    computed = {span.micro_batch for span in record.spans if span.stage == 0}
    carried: list[Wait] = []
    found: list[MicroBatchRecord] = []
    for micro_batch in micro_batches:
        waits = [*carried, *micro_batch.waits]
        is_lost = micro_batch.micro_batch not in computed and was_dropped(micro_batch, record.faults)
        carried = waits if is_lost else []
        found.append(micro_batch if waits == micro_batch.waits else msgspec.structs.replace(micro_batch, waits=waits))
    return found


def _edges(faults: Sequence[FaultRecord], stage: int = 0) -> Floats:
    """Return the alternating starts and ends of a stage's fault times, ascending and disjoint."""
    edges: list[float] = []
    lost = lost_since(faults, stage)
    times = [(fault.since, math.inf if fault.up is None else fault.up) for fault in faults]
    for start, end in sorted([*times, *([(lost, math.inf)] if lost < math.inf else [])]):
        if edges and start <= edges[-1]:
            edges[-1] = max(edges[-1], end)
        elif end > start:
            edges += [start, end]
    return np.array(edges, np.float64)


def _cut(idle: IdleColumns, edges: Floats) -> IdleColumns:
    """Split intervals at all edges within them; pieces from an even edge to the next are `recovery`."""
    first = np.searchsorted(edges, idle.start, side="right")  # the edge after its start
    cuts = np.maximum(np.searchsorted(edges, idle.end, side="left") - first, 0)
    row = np.repeat(np.arange(len(cuts)), cuts + 1)
    number = np.arange(len(row)) - np.repeat(np.cumsum(cuts + 1) - cuts - 1, cuts + 1)  # of a piece in its interval
    edge = first[row] + number
    padded = np.append(edges, math.inf)
    start = np.where(number > 0, padded[edge - 1], idle.start[row])
    end = np.where(number < cuts[row], padded[edge], idle.end[row])
    cause = np.where(edge % 2 == 1, Cause.RECOVERY.code, idle.cause[row])
    return IdleColumns.joined([IdleColumns.of(start, end, cause, idle.place[row])])
