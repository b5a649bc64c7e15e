"""The data of a run's charts, as small arrays, so that a comparison need not keep the runs' records."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...core.latencies import NOT_COMPLETED, completed_requests, latencies
from ...core.micro_batch_columns import Floats, Ints
from ...core.run_record import Unknown
from ..ledger.causes import Cause
from ..ledger.fleet import Fleet
from ..ledger.predictions import predicted_and_measured


@dataclass(frozen=True, slots=True)
class ChartData:
    """The data of the charts of one run, or of all replicas of a fleet together, with the stages of all replicas.

    Durations are in seconds, times in seconds from the run's start. Arrays over requests cover completed requests only.
    Arrays over micro-batches are in dispatch order.

    Attributes:
        span: Duration of the run.
        num_blocks: Blocks of the KV cache; for replicas the largest number, to which all `kv_blocks` are scaled.
        bubbles: Idle time of each request, summed over its micro-batches and the stages (paper 5.3).
        finished: When each request finished, ascending.
        latencies: What `ledger.latencies.latencies` returns, in seconds.
        stage_seconds: For each stage, the compute time of each micro-batch.
        dispatched: When each micro-batch was dispatched.
        prefill_tokens: Prefill tokens of each micro-batch.
        decode_tokens: Decode tokens of each micro-batch.
        kv_blocks: Blocks in use at each dispatch.
        running: Running requests at each dispatch.
        waiting: Waiting requests at each dispatch.
        by_cause: For each stage, its idle time by cause.
        predictions: For each stage, predicted and measured times of the micro-batches that have a prediction.
        unknown: What the run's trace does not record; the corresponding arrays are empty.
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
    by_cause: list[dict[Cause, float]]
    predictions: list[tuple[Floats, Floats]]
    unknown: tuple[Unknown, ...] = ()

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.by_cause)

    @property
    def cause_seconds(self) -> dict[Cause, float]:
        """Idle seconds by cause, summed over the stages."""
        return {cause: sum(stage[cause] for stage in self.by_cause) for cause in Cause}


def fleet_chart_data(fleet: Fleet) -> ChartData:
    """Extract the chart data of a fleet; a standalone run is a fleet of one."""
    served = [(request, bubble) for request, bubble in fleet.served if request.finish_reason not in NOT_COMPLETED]
    num_blocks = max(record.num_blocks for record in fleet.records)
    finished, dispatched, counters = [], [], []
    for (record, ledger), start in zip(fleet.parts, fleet.starts, strict=True):
        requests = completed_requests(record)
        finished += [request.token_times[-1] - ledger.t0 + start for request in requests if request.token_times]
        dispatched.append(ledger.micro_batches.dispatched - ledger.t0 + start)
        scale = num_blocks / record.num_blocks if record.num_blocks else 1.0
        counters.append(ledger.micro_batches.counters * np.array([scale, 1.0, 1.0]))
    if fleet.num_prefill:  # a disaggregated fleet: the replicas' records have only halves of requests
        finished = [request.token_times[-1] for request, _ in served]
    order = np.argsort(np.concatenate(dispatched), kind="stable")

    def ordered(columns: list[Ints]) -> Floats:
        return np.concatenate(columns).astype(np.float64)[order]

    kv_blocks, running, waiting = np.concatenate(counters)[order].T
    return ChartData(
        span=fleet.span_seconds,
        num_blocks=num_blocks,
        bubbles=np.array([bubble for _, bubble in served], np.float64),
        finished=np.sort(np.array(finished, np.float64)),
        latencies={name: values / 1e3 for name, values in latencies([request for request, _ in served]).items()},
        stage_seconds=[lane.seconds for ledger in fleet.ledgers for lane in ledger.lanes],
        dispatched=np.concatenate(dispatched)[order],
        prefill_tokens=ordered([ledger.micro_batches.prefill for ledger in fleet.ledgers]),
        decode_tokens=ordered([ledger.micro_batches.decodes for ledger in fleet.ledgers]),
        kv_blocks=kv_blocks,
        running=running,
        waiting=waiting,
        by_cause=[fleet.seconds_by_cause(stage) for stage in range(fleet.num_stages)],
        predictions=[pair for part in fleet.parts for pair in predicted_and_measured(*part)],
        unknown=tuple(dict.fromkeys(what for record in fleet.records for what in record.unknown)),
    )
