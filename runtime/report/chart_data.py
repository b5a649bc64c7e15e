"""What charts need of a run, as arrays: small beside its record, which need not be kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..core.micro_batch_columns import Floats
from ..core.run_record import RunRecord
from ..ledger.causes import Cause
from ..ledger.fleet import Fleet
from ..ledger.latencies import completed_requests, latencies
from ..ledger.ledger import Ledger
from ..ledger.predictions import predicted_and_measured


@dataclass(frozen=True, slots=True)
class ChartData:
    """Times are seconds, from the run's start where they are moments. Arrays over requests hold completed ones; those
    over micro-batches are in order of dispatch."""

    span: float
    num_blocks: int
    bubbles: Floats  # a value a request, summed over its micro-batches and the stages (paper 5.3)
    finished: Floats  # ascending
    latencies: dict[str, Floats]  # as `summary.latencies`, in seconds
    stage_seconds: list[Floats]  # by stage, a value a micro-batch
    dispatched: Floats
    prefill_tokens: Floats
    decode_tokens: Floats
    kv_blocks: Floats
    running: Floats
    waiting: Floats
    busy: list[float]  # by stage
    by_cause: list[dict[Cause, float]]  # by stage
    predictions: list[tuple[Floats, Floats]]  # by stage, predicted and measured

    @property
    def num_stages(self) -> int:
        return len(self.busy)

    @property
    def cause_seconds(self) -> dict[Cause, float]:
        """Over all stages."""
        return {cause: sum(stage[cause] for stage in self.by_cause) for cause in Cause}


def chart_data(record: RunRecord, ledger: Ledger) -> ChartData:
    done = completed_requests(record)
    finished = [request.token_times[-1] - ledger.t0 for request in done if request.token_times]
    micro_batches = ledger.micro_batches
    order = np.argsort(micro_batches.dispatched, kind="stable")
    kv, running, waiting = micro_batches.counters[order].T.astype(np.float64)
    return ChartData(
        span=ledger.span_seconds,
        num_blocks=record.num_blocks,
        bubbles=np.array([ledger.bubble_of_request(request.request) for request in done], np.float64),
        finished=np.sort(np.array(finished, np.float64)),
        latencies={name: values / 1e3 for name, values in latencies(done).items()},
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
    )


def joined(parts: Sequence[ChartData], starts: Sequence[float], span: float) -> ChartData:
    """Runs that were side by side as one, with the stages of all; `starts`: seconds from `span`'s to each one's."""
    order = np.argsort(np.concatenate([d.dispatched + s for d, s in zip(parts, starts, strict=True)]), kind="stable")

    def ordered(name: str) -> Floats:
        values: Floats = np.concatenate([getattr(part, name) for part in parts])[order]
        return values

    by_cause = []
    for part in parts:
        outside = span - part.span  # while only the others ran
        by_cause += [row | {Cause.FILL_DRAIN: row[Cause.FILL_DRAIN] + outside} for row in part.by_cause]
    return ChartData(
        span=span,
        num_blocks=parts[0].num_blocks,
        bubbles=np.concatenate([part.bubbles for part in parts]),
        finished=np.sort(np.concatenate([part.finished + s for part, s in zip(parts, starts, strict=True)])),
        latencies={name: np.concatenate([part.latencies[name] for part in parts]) for name in parts[0].latencies},
        stage_seconds=[seconds for part in parts for seconds in part.stage_seconds],
        dispatched=np.sort(np.concatenate([part.dispatched + s for part, s in zip(parts, starts, strict=True)])),
        prefill_tokens=ordered("prefill_tokens"),
        decode_tokens=ordered("decode_tokens"),
        kv_blocks=ordered("kv_blocks"),
        running=ordered("running"),
        waiting=ordered("waiting"),
        busy=[seconds for part in parts for seconds in part.busy],
        by_cause=by_cause,
        predictions=[pair for part in parts for pair in part.predictions],
    )


def fleet_chart_data(fleet: Fleet) -> ChartData:
    """What charts need of all replicas together."""
    own = [chart_data(record, ledger) for record, ledger in zip(fleet.records, fleet.ledgers, strict=True)]
    return own[0] if len(own) == 1 else joined(own, fleet.starts, fleet.span_seconds)
