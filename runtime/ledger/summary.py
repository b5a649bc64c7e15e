"""A run's key numbers, under the names of `vllm bench serve --save-result` where it has one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...conf.workloads import SloConfig
from ..core.micro_batch_columns import Floats
from ..core.request_record import RequestRecord
from ..core.run_record import RunRecord
from .causes import STARVED, Cause
from .ledger import Ledger, inner_bubble_fraction

NOT_COMPLETED = (None, "abort", "error")  # finish reasons of requests that count as failed


def time_to_first_token(request: RequestRecord) -> float | None:
    """Seconds from arrival to the first token; None before it."""
    return request.token_times[0] - request.arrival if request.token_times else None


def tokens_apart(request: RequestRecord) -> Floats:
    """Seconds between the request's consecutive tokens (TBT, inter-token latency), one fewer than tokens."""
    return np.diff(np.asarray(request.token_times, np.float64))


def latencies(requests: list[RequestRecord]) -> dict[str, Floats]:
    """Milliseconds over the requests, by name: `ttft`, `tpot` and `e2el` a value a request that has one, `itl` a value
    for each pair of consecutive tokens."""
    gaps = [tokens_apart(request) for request in requests]
    ttft = [first for request in requests if (first := time_to_first_token(request)) is not None]
    e2el = [request.token_times[-1] - request.arrival for request in requests if request.token_times]
    seconds = {
        "ttft": np.array(ttft, np.float64),
        "tpot": np.array([gap.mean() for gap in gaps if len(gap)], np.float64),
        "itl": np.concatenate(gaps) if gaps else np.empty(0),
        "e2el": np.array(e2el, np.float64),
    }
    return {name: values * 1e3 for name, values in seconds.items()}


def completed_requests(record: RunRecord) -> list[RequestRecord]:
    """Those that finished by themselves."""
    return [request for request in record.requests if request.finish_reason not in NOT_COMPLETED]


def meets(request: RequestRecord, slo: SloConfig) -> bool:
    """Whether a request that has finished kept every bound of `slo`; what it has no value of (the gaps of a single
    token) it keeps."""
    if not request.token_times:
        return False
    gaps = tokens_apart(request)
    first, last = request.token_times[0] - request.arrival, request.token_times[-1] - request.arrival
    seconds = {
        "ttft_ms": first,
        "tpot_ms": float(gaps.mean()) if len(gaps) else 0.0,
        "tbt_ms": float(gaps.max()) if len(gaps) else 0.0,
        "e2el_ms": last,
    }
    bounds = {key: getattr(slo, key) for key in seconds}
    return all(bound is None or seconds[key] * 1e3 <= bound for key, bound in bounds.items())


def has_bound(slo: SloConfig) -> bool:
    return slo != SloConfig()


def prediction_ratios(record: RunRecord, ledger: Ledger) -> list[tuple[Floats, Floats]]:
    """For each stage the predicted and the measured seconds of the micro-batches that were predicted."""
    foreseen = {m.micro_batch: m.predicted for m in record.micro_batches if m.predicted}
    pairs = []
    for stage, lane in enumerate(ledger.lanes):
        there = [i for i, micro_batch in enumerate(lane.micro_batch.tolist()) if micro_batch in foreseen]
        predicted = np.array([foreseen[int(lane.micro_batch[i])][stage] for i in there], np.float64)
        pairs.append((predicted, lane.seconds[there]))
    return pairs


def prediction_error(pairs: list[tuple[Floats, Floats]]) -> dict[str, float] | None:
    """Median and p90 of |predicted / measured - 1| over all of `pairs`; None where nothing was predicted."""
    errors = np.concatenate([np.abs(p[m > 0] / m[m > 0] - 1.0) for p, m in pairs]) if pairs else np.empty(0)
    if not len(errors):
        return None
    median, p90 = np.percentile(errors, [50, 90]).tolist()
    return {"median": median, "p90": p90}


@dataclass(slots=True)
class Totals:
    """What a summary is made of. Seconds; `latency`: milliseconds, a row of statistics by name."""

    duration: float
    completed: int
    failed: int
    tokens_in: int  # of completed requests
    tokens_out: int
    latency: dict[str, dict[str, float]]
    seconds: dict[Cause, float]  # idle, by cause
    busy: list[float]  # by stage
    span: float
    median_bubble: float  # of a completed request
    micro_batches: int
    tokens: int  # in micro-batches
    cv_stage_time: float
    peak_kv_fraction: float
    preemptions: int
    prediction_error: dict[str, float] | None
    notes: list[str]
    good: int | None  # requests that met the SLO; None: there is none

    def rate(self, count: int) -> float:
        """A second of the run."""
        return count / self.duration if self.duration > 0 else 0.0

    def summary(self) -> dict[str, Any]:
        """The contents of `summary.json`."""
        idle, stage_seconds = sum(self.seconds.values()), self.span * len(self.busy)
        summary: dict[str, Any] = {
            "duration": self.duration,
            "completed": self.completed,
            "failed": self.failed,
            "total_input_tokens": self.tokens_in,
            "total_output_tokens": self.tokens_out,
            "request_throughput": self.rate(self.completed),
            "output_throughput": self.rate(self.tokens_out),
            "total_token_throughput": self.rate(self.tokens_in + self.tokens_out),
        }
        for name, row in self.latency.items():
            summary |= {f"{statistic}_{name}_ms": value for statistic, value in row.items()}
        summary |= {
            "bubble_fraction": idle / stage_seconds if stage_seconds > 0 else 0.0,
            "bubble_fraction_inner": inner_bubble_fraction(self.seconds, stage_seconds),
            "bubble_seconds": {str(cause): value for cause, value in self.seconds.items()},
            "starved_seconds": sum(self.seconds[cause] for cause in STARVED),
            "median_bubble_ms_per_request": self.median_bubble * 1e3,
            "stage_busy_fraction": [busy / self.span if self.span > 0 else 0.0 for busy in self.busy],
            "micro_batches": self.micro_batches,
            "mean_tokens_per_micro_batch": self.tokens / self.micro_batches if self.micro_batches else 0.0,
            "cv_stage_time": self.cv_stage_time,
            "peak_kv_fraction": self.peak_kv_fraction,
            "preemptions": self.preemptions,
            "prediction_error": self.prediction_error,
            "notes": self.notes,
        }
        if self.good is not None:
            summary["request_goodput"] = self.rate(self.good)
        return summary


def summarize(record: RunRecord, ledger: Ledger, slo: SloConfig | None = None) -> dict[str, Any]:
    """The contents of `summary.json`; values are plain Python, 0 where a run has nothing to measure.

    Token counts and latencies are over completed requests, as vLLM's are. `duration` is seconds from the first
    arrival to the last token or compute; `bubble_seconds` holds each cause and sums to the idle seconds.
    `request_goodput` (requests/s that met `slo`) is there only where `slo` bounds something.
    """
    last = max((request.token_times[-1] for request in record.requests if request.token_times), default=ledger.t1)
    return totals(
        [(record, ledger)],
        duration=max(last, ledger.t1) - ledger.t0,
        seconds=ledger.seconds_by_cause(),
        busy=[ledger.busy_seconds(stage) for stage in range(ledger.num_stages)],
        span=ledger.span_seconds,
        notes=list(record.notes),
        slo=slo,
    ).summary()


def totals(
    parts: Sequence[tuple[RunRecord, Ledger]],
    *,
    duration: float,
    seconds: dict[Cause, float],
    busy: list[float],
    span: float,
    notes: list[str],
    slo: SloConfig | None,
) -> Totals:
    """What one pipeline, or several side by side, come to; the arguments after `parts` are those of `Totals`."""
    done = [request for record, _ in parts for request in completed_requests(record)]
    requests = [request for record, _ in parts for request in record.requests]
    bubbles = [ledger.bubble_of_request(r.request) for record, ledger in parts for r in completed_requests(record)]
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
        failed=len(requests) - len(done),
        tokens_in=sum(request.prompt_tokens for request in done),
        tokens_out=sum(request.output_tokens for request in done),
        latency={name: statistics(values) for name, values in latencies(done).items()},
        seconds=seconds,
        busy=busy,
        span=span,
        median_bubble=float(np.median(bubbles)) if bubbles else 0.0,
        micro_batches=sum(len(record.micro_batches) for record, _ in parts),
        tokens=sum(int(ledger.micro_batches.tokens.sum()) for _, ledger in parts),
        cv_stage_time=float(np.mean([variation(values) for values in times])) if times else 0.0,
        peak_kv_fraction=max(peaks),
        preemptions=sum(request.preemptions for request in requests),
        prediction_error=prediction_error([pair for part in parts for pair in prediction_ratios(*part)]),
        notes=notes,
        good=sum(meets(request, slo) for request in done) if slo is not None and has_bound(slo) else None,
    )


def statistics(values: Floats) -> dict[str, float]:
    """What a summary says of a latency; zeros of nothing."""
    if not len(values):
        values = np.zeros(1)
    p90, p99 = np.percentile(values, [90, 99])
    found = {"mean": values.mean(), "median": np.median(values), "std": values.std(), "p90": p90, "p99": p99}
    return {statistic: float(value) for statistic, value in found.items()}


def variation(values: Floats) -> float:
    """Coefficient of variation: standard deviation over mean; 0 of nothing."""
    mean = float(values.mean()) if len(values) else 0.0
    return float(values.std()) / mean if mean > 0 else 0.0
