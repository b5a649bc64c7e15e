"""The data of a run's charts, as arrays. They are small, so that a comparison need not keep the runs' records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..core.micro_batch_columns import Floats
from ..core.run_record import RunRecord, Unknown
from ..ledger.causes import Cause
from ..ledger.fleet import Fleet
from ..ledger.latencies import NOT_COMPLETED, completed_requests, latencies
from ..ledger.ledger import Ledger
from ..ledger.predictions import predicted_and_measured


@dataclass(frozen=True, slots=True)
class ChartData:
    """The data of one run's charts.

    Durations are seconds, moments are seconds from the run's start. Only completed requests have values in the arrays
    over requests. The arrays over micro-batches are in order of dispatch.

    Attributes:
        span: Duration of the run.
        num_blocks: Blocks of the KV cache; of replicas the largest one's, to which `kv_blocks` of all are scaled.
        bubbles: Idle time of each request, summed over its micro-batches and the stages (paper 5.3).
        finished: When each request finished, ascending.
        latencies: What `ledger.summary.latencies` returns, in seconds.
        stage_seconds: For each stage, the compute time of each micro-batch.
        dispatched: When each micro-batch was dispatched.
        prefill_tokens: Prefill tokens of each micro-batch.
        decode_tokens: Decode tokens of each micro-batch.
        kv_blocks: Blocks in use at each dispatch.
        running: Running requests at each dispatch.
        waiting: Waiting requests at each dispatch.
        busy: Compute time of each stage.
        by_cause: For each stage, its idle time by cause.
        predictions: For each stage, the predicted and the measured times of the micro-batches that had a prediction.
        unknown: What the run's trace did not say; the arrays of it hold nothing.
    """

    span: float
    num_blocks: int
    bubbles: Floats
    finished: Floats
    latencies: dict[str, Floats]
    stage_seconds: list[Floats]
    dispatched: Floats
    prefill_tokens: Floats
    decode_tokens: Floats
    kv_blocks: Floats
    running: Floats
    waiting: Floats
    busy: list[float]
    by_cause: list[dict[Cause, float]]
    predictions: list[tuple[Floats, Floats]]
    unknown: tuple[Unknown, ...] = ()

    @property
    def num_stages(self) -> int:
        return len(self.busy)

    @property
    def cause_seconds(self) -> dict[Cause, float]:
        """Idle seconds by cause, summed over the stages."""
        return {cause: sum(stage[cause] for stage in self.by_cause) for cause in Cause}


def chart_data(record: RunRecord, ledger: Ledger) -> ChartData:
    """Extract the data of a run's charts from its record and ledger."""
    completed = completed_requests(record)
    finished = [request.token_times[-1] - ledger.t0 for request in completed if request.token_times]
    micro_batches = ledger.micro_batches
    order = np.argsort(micro_batches.dispatched, kind="stable")
    kv, running, waiting = micro_batches.counters[order].T.astype(np.float64)
    return ChartData(
        span=ledger.span_seconds,
        num_blocks=record.num_blocks,
        bubbles=np.array([ledger.bubble_of_request(request.request) for request in completed], np.float64),
        finished=np.sort(np.array(finished, np.float64)),
        latencies={name: values / 1e3 for name, values in latencies(completed).items()},
        stage_seconds=[lane.seconds for lane in ledger.lanes],
        dispatched=micro_batches.dispatched[order] - ledger.t0,
        prefill_tokens=micro_batches.prefill[order].astype(np.float64),
        decode_tokens=micro_batches.decodes[order].astype(np.float64),
        kv_blocks=kv,
        running=running,
        waiting=waiting,
        busy=[ledger.busy_seconds(stage) for stage in range(ledger.num_stages)],
        by_cause=[ledger.seconds_by_cause(stage) for stage in range(ledger.num_stages)],
        predictions=predicted_and_measured(record, ledger),
        unknown=tuple(record.unknown),
    )


def join_chart_data(parts: Sequence[ChartData], starts: Sequence[float], span: float) -> ChartData:
    """Join the runs of replicas into one run that has the stages of all.

    Args:
        parts: The data of each replica's run.
        starts: Seconds from the start of the joined run to the start of each part.
        span: Duration of the joined run, in seconds.
    """
    dispatched = np.concatenate([part.dispatched + s for part, s in zip(parts, starts, strict=True)])
    order = np.argsort(dispatched, kind="stable")

    def ordered(name: str) -> Floats:
        values: Floats = np.concatenate([getattr(part, name) for part in parts])[order]
        return values

    num_blocks = max(part.num_blocks for part in parts)
    shares = [part.kv_blocks * (num_blocks / part.num_blocks if part.num_blocks else 1.0) for part in parts]
    kv_blocks: Floats = np.concatenate(shares)
    by_cause = []
    for part in parts:
        outside = span - part.span  # time before the part's start and after its end
        by_cause += [row | {Cause.FILL_DRAIN: row[Cause.FILL_DRAIN] + outside} for row in part.by_cause]
    return ChartData(
        span=span,
        num_blocks=num_blocks,
        bubbles=np.concatenate([part.bubbles for part in parts]),
        finished=np.sort(np.concatenate([part.finished + s for part, s in zip(parts, starts, strict=True)])),
        latencies={name: np.concatenate([part.latencies[name] for part in parts]) for name in parts[0].latencies},
        stage_seconds=[seconds for part in parts for seconds in part.stage_seconds],
        dispatched=dispatched[order],
        prefill_tokens=ordered("prefill_tokens"),
        decode_tokens=ordered("decode_tokens"),
        kv_blocks=kv_blocks[order],
        running=ordered("running"),
        waiting=ordered("waiting"),
        busy=[seconds for part in parts for seconds in part.busy],
        by_cause=by_cause,
        predictions=[pair for part in parts for pair in part.predictions],
    )


def fleet_chart_data(fleet: Fleet) -> ChartData:
    """Extract the data of charts over all replicas of a fleet together."""
    parts = [chart_data(record, ledger) for record, ledger in zip(fleet.records, fleet.ledgers, strict=True)]
    if len(parts) == 1:
        return parts[0]
    joined = join_chart_data(parts, fleet.starts, fleet.span_seconds)
    return _with_whole_requests(joined, fleet) if fleet.num_prefill else joined


def _with_whole_requests(data: ChartData, fleet: Fleet) -> ChartData:
    """Replace what is of halves of requests, in a prefill and a decode pool, by that of whole ones."""
    completed = [request for request in fleet.joined if request.record.finish_reason not in NOT_COMPLETED]
    records = [request.record for request in completed]
    return replace(
        data,
        bubbles=np.array([request.bubble for request in completed], np.float64),
        finished=np.sort(np.array([record.token_times[-1] for record in records], np.float64)),
        latencies={name: values / 1e3 for name, values in latencies(records).items()},
    )
