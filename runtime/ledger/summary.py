"""The key numbers of a run, under the names of `vllm bench serve --save-result` where it has one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...conf.workloads import SloConfig
from ..core.micro_batch_columns import Floats
from ..core.request_record import RequestRecord
from ..core.run_record import RunRecord, Unknown
from .causes import STARVED, Cause
from .latencies import NOT_COMPLETED, latencies, statistics
from .ledger import Ledger, inner_bubble_fraction
from .predictions import predicted_and_measured, prediction_error
from .recovery import down_seconds, fault_summary, replay_seconds
from .slo import has_bound, meets
from .stragglers import find_stragglers

_KEYS_OF: dict[Unknown, tuple[str, ...]] = {  # of what a trace may not say; latencies come with requests
    "requests": (
        *("completed", "failed", "total_input_tokens", "cached_input_tokens", "total_output_tokens"),
        *("request_throughput", "output_throughput", "total_token_throughput", "median_bubble_ms_per_request"),
        *("draft_tokens", "accepted_tokens", "accepted_tokens_per_decode", "preemptions"),
    ),
    "kv": ("peak_kv_fraction",),
    "tokens": ("mean_tokens_per_micro_batch",),
}


@dataclass(slots=True)
class Totals:
    """The sums and statistics that a summary is made of. Times are seconds, but for `latency`."""

    duration: float
    completed: int  # requests
    failed: int
    input_tokens: int  # of completed requests
    cached_tokens: int  # of them, found in the prefix cache
    output_tokens: int
    latency: dict[str, dict[str, float]]  # milliseconds: statistics by name of the latency
    idle: dict[Cause, float]
    busy: list[float]  # by stage
    span: float
    median_bubble: float  # of a completed request
    micro_batches: int
    tokens: int  # in micro-batches
    decodes: int  # of a request in a micro-batch each
    drafts: int  # tokens that were guessed and verified
    accepted: int  # of the drafts
    cv_stage_time: float
    batch: int  # B, most requests of a micro-batch
    depth: int  # most micro-batches in flight, of each pipeline; of the decode pool where there are pools
    peak_kv_fraction: float
    preemptions: int
    prediction_error: dict[str, float] | None
    faults: list[dict[str, Any]]  # `fault_summary` of each
    recovery: float  # seconds for which a pipeline had failed
    stragglers: list[dict[str, Any]] | None  # `Straggler.summary` of each; None: not looked for
    notes: list[str]
    met_slo: int | None  # requests; None without an SLO
    unknown: Sequence[Unknown] = ()  # what a trace did not say; what is of it is left out

    def rate(self, count: int) -> float:
        """The count per second of `duration`."""
        return count / self.duration if self.duration > 0 else 0.0

    def summary(self) -> dict[str, Any]:
        """The contents of `summary.json`."""
        idle_seconds, stage_seconds = sum(self.idle.values()), self.span * len(self.busy)
        summary: dict[str, Any] = {
            "duration": self.duration,
            "completed": self.completed,
            "failed": self.failed,
            "total_input_tokens": self.input_tokens,
            "cached_input_tokens": self.cached_tokens,
            "total_output_tokens": self.output_tokens,
            "request_throughput": self.rate(self.completed),
            "output_throughput": self.rate(self.output_tokens),
            "total_token_throughput": self.rate(self.input_tokens + self.output_tokens),
        }
        for name, row in self.latency.items():
            summary |= {f"{statistic}_{name}_ms": value for statistic, value in row.items()}
        summary |= {
            "bubble_fraction": idle_seconds / stage_seconds if stage_seconds > 0 else 0.0,
            "bubble_fraction_inner": inner_bubble_fraction(self.idle, stage_seconds),
            "bubble_seconds": {str(cause): value for cause, value in self.idle.items()},
            "starved_seconds": sum(self.idle[cause] for cause in STARVED),
            "median_bubble_ms_per_request": self.median_bubble * 1e3,
            "stage_busy_fraction": [busy / self.span if self.span > 0 else 0.0 for busy in self.busy],
            "micro_batches": self.micro_batches,
            "mean_tokens_per_micro_batch": self.tokens / self.micro_batches if self.micro_batches else 0.0,
            "draft_tokens": self.drafts,
            "accepted_tokens": self.accepted,
            "accepted_tokens_per_decode": self.accepted / self.decodes if self.decodes else 0.0,
            "cv_stage_time": self.cv_stage_time,
            "batch": self.batch,
            "depth": self.depth,
            "peak_kv_fraction": self.peak_kv_fraction,
            "preemptions": self.preemptions,
            "prediction_error": self.prediction_error,
            "faults": self.faults,
            "recovery_seconds": self.recovery,
            "notes": self.notes,
        }
        if self.stragglers is not None:
            summary["stragglers"] = self.stragglers
        if self.met_slo is not None:
            summary["request_goodput"] = self.rate(self.met_slo)
        if self.unknown:
            absent = {key for unknown in self.unknown for key in _KEYS_OF.get(unknown, ())}
            if "requests" in self.unknown:
                absent |= {f"{statistic}_{name}_ms" for name, row in self.latency.items() for statistic in row}
            summary = {key: value for key, value in summary.items() if key not in absent}
            summary["unknown"] = list(self.unknown)
        return summary


def summarize(record: RunRecord, ledger: Ledger, slo: SloConfig | None = None) -> dict[str, Any]:
    """The contents of `summary.json`: plain Python values, 0 where a run has nothing to measure.

    Token counts and latencies are over completed requests, as vLLM's are. `duration` is the seconds from the first
    arrival to the last token or compute. `bubble_seconds` holds each cause and sums to the idle seconds.
    `request_goodput` (requests/s that met `slo`) is there only where `slo` has a bound, and `unknown` only where the
    run was read from a trace that does not say all; keys of what it does not say are missing.
    """
    last = max((request.token_times[-1] for request in record.requests if request.token_times), default=ledger.t1)
    return totals(
        [(record, ledger)],
        served=[(request, ledger.bubble_of_request(request.request)) for request in record.requests],
        duration=max(last, ledger.t1) - ledger.t0,
        idle=ledger.seconds_by_cause(),
        busy=[ledger.busy_seconds(stage) for stage in range(ledger.num_stages)],
        span=ledger.span_seconds,
        notes=list(record.notes),
        slo=slo,
    ).summary()


def totals(
    parts: Sequence[tuple[RunRecord, Ledger]],
    *,
    served: Sequence[tuple[RequestRecord, float]],
    duration: float,
    idle: dict[Cause, float],
    busy: list[float],
    span: float,
    notes: list[str],
    slo: SloConfig | None,
    starts: Sequence[float] = (0.0,),
) -> Totals:
    """The totals of one pipeline, or of several side by side.

    Args:
        parts: the record and the ledger of each pipeline.
        served: each request once, with its bubble time.
        slo: with bounds, the requests that met it are counted.
        starts: seconds from the first start of all to that of each pipeline.

    The other arguments are the fields of `Totals`.
    """
    completed = [(request, bubble) for request, bubble in served if request.finish_reason not in NOT_COMPLETED]
    done, bubbles = [request for request, _ in completed], [bubble for _, bubble in completed]
    times = [lane.seconds for _, ledger in parts for lane in ledger.lanes if len(lane.micro_batch)]
    peaks = [
        max((m.kv_blocks_used for m in record.micro_batches), default=0) / record.num_blocks
        if record.num_blocks
        else 0.0
        for record, _ in parts
    ]
    return Totals(
        duration=duration,
        completed=len(done),
        failed=len(served) - len(done),
        input_tokens=sum(request.prompt_tokens for request in done),
        cached_tokens=sum(request.cached_tokens for request in done),
        output_tokens=sum(request.output_tokens for request in done),
        latency={name: statistics(values) for name, values in latencies(done).items()},
        idle=idle,
        busy=busy,
        span=span,
        median_bubble=float(np.median(bubbles)) if bubbles else 0.0,
        micro_batches=sum(len(record.micro_batches) for record, _ in parts),
        tokens=sum(int(ledger.micro_batches.tokens.sum()) for _, ledger in parts),
        decodes=sum(m.decode_tokens - m.drafts for record, _ in parts for m in record.micro_batches),
        drafts=sum(m.drafts for record, _ in parts for m in record.micro_batches),
        accepted=sum(m.accepted for record, _ in parts for m in record.micro_batches),
        cv_stage_time=float(np.mean([variation(values) for values in times])) if times else 0.0,
        batch=parts[-1][0].batch,
        depth=parts[-1][0].depth,
        peak_kv_fraction=max(peaks),
        preemptions=sum(request.preemptions for request, _ in served),
        prediction_error=prediction_error([pair for part in parts for pair in predicted_and_measured(*part)]),
        faults=[
            fault_summary(fault, ledger.t0 - start, replay) | ({"replica": number} if len(parts) > 1 else {})
            for number, ((record, ledger), start) in enumerate(zip(parts, starts, strict=True))
            for fault, replay in zip(record.faults, replay_seconds(record), strict=True)
        ],
        recovery=sum(down_seconds(record.faults, ledger.t1) for record, ledger in parts),
        stragglers=[
            each.summary(ledger.t0 - start)
            for (_, ledger), start in zip(parts, starts, strict=True)
            for each in find_stragglers(ledger)
        ],
        notes=notes,
        unknown=list(dict.fromkeys(unknown for record, _ in parts for unknown in record.unknown)),
        met_slo=sum(meets(request, slo) for request in done) if slo is not None and has_bound(slo) else None,
    )


def variation(values: Floats) -> float:
    """Coefficient of variation, standard deviation over mean; 0 where there is no value."""
    mean = float(values.mean()) if len(values) else 0.0
    return float(values.std()) / mean if mean > 0 else 0.0
