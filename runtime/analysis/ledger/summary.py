"""The key metrics of a run, named as in `vllm bench serve --save-result` if it has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ....conf.workloads import SloConfig
from ...core.latencies import GOES_ON, NOT_COMPLETED, latencies, statistics
from ...core.micro_batch_columns import Floats, Ints
from ...core.request_record import RequestRecord
from ...core.run_record import MicroBatchRecord, RunRecord, Unknown
from .causes import STARVED, Cause
from .compute_shares import compute_shares
from .fleet import Fleet
from .ledger import inner_bubble_fraction
from .predictions import predicted_and_measured, prediction_error
from .recovery import down_seconds, fault_summary, replay_seconds
from .slo import has_bound, meets

_KEYS_OF: dict[Unknown, tuple[str, ...]] = {  # keys that need what a trace may lack; latencies need `requests` too
    "requests": (
        *("completed", "failed", "total_input_tokens", "cached_input_tokens", "total_output_tokens"),
        *("request_throughput", "output_throughput", "total_token_throughput", "median_bubble_ms_per_request"),
        *("draft_tokens", "accepted_tokens", "accepted_tokens_per_decode", "preemptions"),
    ),
    "stages": (
        *("bubble_fraction", "bubble_fraction_inner", "bubble_seconds", "starved_seconds", "stage_busy_fraction"),
        *("median_bubble_ms_per_request", "micro_batches", "mean_tokens_per_micro_batch", "cv_stage_time", "batch"),
        *("draft_tokens", "accepted_tokens", "accepted_tokens_per_decode", "depth", "preemptions", "prediction_error"),
    ),
    "kv": ("peak_kv_fraction",),
    "tokens": ("mean_tokens_per_micro_batch",),
}


@dataclass(slots=True)
class Totals:
    """The sums and statistics that a summary is made of. Times are in seconds, except `latency`."""

    duration: float
    completed: int  # requests
    failed: int
    input_tokens: int  # of completed requests
    cached_tokens: int  # input tokens found in the prefix cache
    output_tokens: int
    latency: dict[str, dict[str, float]]  # milliseconds: statistics by name of the latency
    idle: dict[Cause, float]
    busy: list[float]  # by stage
    span: float
    median_bubble: float  # of a completed request
    micro_batches: int
    tokens: int  # in micro-batches
    decodes: int  # one per request and micro-batch
    drafts: int  # draft tokens verified
    accepted: int  # draft tokens accepted
    cv_stage_time: float
    batch: int  # B, maximum requests per micro-batch
    depth: int  # maximum micro-batches in flight per pipeline; of the decode pool if there are pools
    peak_kv_fraction: float
    preemptions: int
    prediction_error: dict[str, float] | None
    faults: list[dict[str, Any]]  # `fault_summary` of each
    recovery: float  # seconds for which a pipeline was down
    stragglers: list[dict[str, Any]] | None  # `Straggler.summary` of each; None: not looked for
    compute: list[dict[str, Any]]  # `ComputeShare.summary` of each stage and phase
    notes: list[str]
    met_slo: int | None  # requests; None without an SLO
    unknown: Sequence[Unknown] = ()  # what a trace lacked; keys that need it are left out

    def rate(self, count: int) -> float:
        """Return the count per second of `duration`."""
        return count / self.duration if self.duration > 0 else 0.0

    def summary(self) -> dict[str, Any]:
        """Return the contents of `summary.json`."""
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
            "compute": self.compute,
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


def summarize(fleet: Fleet, slo: SloConfig | None = None) -> dict[str, Any]:
    """Return the contents of `summary.json`: plain Python values, 0 if a run has nothing to measure.

    Requests, tokens and latencies are over all replicas, throughput is over the duration, and seconds are summed over
    all stages. Token counts and latencies are over completed requests, as in vLLM. `duration` is the seconds from the
    first arrival to the last token or compute. `bubble_seconds` contains every cause and sums to the idle seconds.
    `request_goodput` (requests/s that met `slo`) is present only if `slo` has a bound, and `unknown` only if the run
    was read from an incomplete trace; keys that the trace cannot provide are missing. Several replicas add their
    number, their starts and the requests of each. Pools add the number of prefill replicas and the KV wait and
    transfer times.
    """
    summary = totals(fleet, slo).summary()
    if fleet.is_several:
        summary |= {
            "replicas": len(fleet.records),
            "replica_starts": fleet.starts,
            "requests_per_replica": [len(record.requests) for record in fleet.records],
        }
    if fleet.num_prefill:
        waits = [request.kv_wait for request in fleet.joined if request.kv_wait is not None]
        moves = [request.kv_transfer for request in fleet.joined if request.kv_transfer is not None]
        summary |= {"prefill_replicas": fleet.num_prefill, "kv_transfers": len(moves)}
        for name, seconds in (("kv_wait", waits), ("kv_transfer", moves)):
            found = statistics(1e3 * np.array(seconds, np.float64))
            summary |= {f"{statistic}_{name}_ms": value for statistic, value in found.items()}
    return summary


def request_counts(requests: Sequence[RequestRecord]) -> dict[str, Any]:
    """Return the fields of `Totals` that count requests and their tokens; token counts are over completed requests.

    For a request that crosses an edge of a recorded window, the tokens in the window count; its prompt counts with its
    first output token.
    """
    done = [request for request in requests if request.finish_reason not in NOT_COMPLETED]
    return {
        "completed": sum(request.finish_reason != GOES_ON for request in done),
        "failed": len(requests) - len(done),
        "input_tokens": sum(request.prompt_tokens for request in done if not request.earlier_tokens),
        "cached_tokens": sum(request.cached_tokens for request in done if not request.earlier_tokens),
        "output_tokens": sum(request.output_tokens for request in done),
        "preemptions": sum(request.preemptions for request in requests),
    }


def micro_batch_counts(micro_batches: Sequence[MicroBatchRecord], tokens: Ints, decodes: Ints) -> dict[str, Any]:
    """Return the fields of `Totals` that count micro-batches and their contents; `tokens`, `decodes`: of each."""
    drafts = sum(m.drafts for m in micro_batches)
    return {
        "micro_batches": len(micro_batches),
        "tokens": int(tokens.sum()),
        "decodes": int(decodes.sum()) - drafts,
        "drafts": drafts,
        "accepted": sum(m.accepted for m in micro_batches),
    }


def totals(fleet: Fleet, slo: SloConfig | None) -> Totals:
    """Return the totals of all replicas; if `slo` has bounds, the requests that met it are counted."""
    records, ledgers, served = fleet.records, fleet.ledgers, fleet.served
    completed = [(request, bubble) for request, bubble in served if request.finish_reason not in NOT_COMPLETED]
    done, bubbles = [request for request, _ in completed], [bubble for _, bubble in completed]
    micro_batches = [micro_batch for record in records for micro_batch in record.micro_batches]
    tokens = np.concatenate([ledger.micro_batches.tokens for ledger in ledgers])
    decodes = np.concatenate([ledger.micro_batches.decodes for ledger in ledgers])
    times = [lane.seconds for ledger in ledgers for lane in ledger.lanes if len(lane.micro_batch)]
    predictions = [pair for part in fleet.parts for pair in predicted_and_measured(*part)]
    return Totals(
        **request_counts([request for request, _ in served]),
        **micro_batch_counts(micro_batches, tokens, decodes),
        duration=fleet.duration,
        latency={name: statistics(values) for name, values in latencies(done).items()},
        idle=fleet.seconds_by_cause(),
        busy=[fleet.busy_seconds(stage) for stage in range(fleet.num_stages)],
        span=fleet.span_seconds,
        median_bubble=float(np.median(bubbles)) if bubbles else 0.0,
        cv_stage_time=float(np.mean([variation(values) for values in times])) if times else 0.0,
        batch=records[-1].batch,
        depth=records[-1].depth,
        peak_kv_fraction=max(_peak_kv(record) for record in records),
        prediction_error=prediction_error(predictions),
        faults=[
            fault_summary(fault, ledger.t0 - start, replay) | ({"replica": number} if fleet.is_several else {})
            for number, ((record, ledger), start) in enumerate(zip(fleet.parts, fleet.starts, strict=True))
            for fault, replay in zip(record.faults, replay_seconds(record), strict=True)
        ],
        recovery=sum(down_seconds(record.faults, ledger.t1) for record, ledger in fleet.parts),
        stragglers=[
            each.summary(ledger.t0 - start)
            for ledger, start, found in zip(ledgers, fleet.starts, fleet.stragglers, strict=True)
            for each in found
        ],
        compute=[share.summary() for share in compute_shares(*fleet.parts)],
        notes=fleet.notes,
        unknown=list(dict.fromkeys(unknown for record in records for unknown in record.unknown)),
        met_slo=sum(meets(request, slo) for request in done) if slo is not None and has_bound(slo) else None,
    )


def _peak_kv(record: RunRecord) -> float:
    """Return the largest share of the KV blocks that was in use at a dispatch."""
    used = max((m.kv_blocks_used for m in record.micro_batches), default=0)
    return used / record.num_blocks if record.num_blocks else 0.0


def variation(values: Floats) -> float:
    """Return the coefficient of variation, standard deviation over mean; 0 without values."""
    mean = float(values.mean()) if len(values) else 0.0
    return float(values.std()) / mean if mean > 0 else 0.0
