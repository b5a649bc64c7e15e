"""A run's key numbers, under the names of `vllm bench serve --save-result` where it has one."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..conf.workloads import SloConfig
from .ledger import STARVED, Floats, Ledger
from .spans import RequestRecord, RunRecord

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
    foreseen = {step.step: step.predicted for step in record.steps if step.predicted}
    pairs = []
    for stage, lane in enumerate(ledger.lanes):
        there = [i for i, step in enumerate(lane.step.tolist()) if step in foreseen]
        predicted = np.array([foreseen[int(lane.step[i])][stage] for i in there], np.float64)
        pairs.append((predicted, lane.seconds[there]))
    return pairs


def prediction_error(pairs: list[tuple[Floats, Floats]]) -> dict[str, float] | None:
    """Median and p90 of |predicted / measured - 1| over all of `pairs`; None where nothing was predicted."""
    errors = np.concatenate([np.abs(p[m > 0] / m[m > 0] - 1.0) for p, m in pairs]) if pairs else np.empty(0)
    if not len(errors):
        return None
    median, p90 = np.percentile(errors, [50, 90]).tolist()
    return {"median": median, "p90": p90}


def summarize(record: RunRecord, ledger: Ledger, slo: SloConfig | None = None) -> dict[str, Any]:
    """The contents of `summary.json`; values are plain Python, 0 where a run has nothing to measure.

    Token counts and latencies are over completed requests, as vLLM's are. `duration` is seconds from the first
    arrival to the last token or compute; `bubble_seconds` holds each cause and sums to the idle seconds.
    `request_goodput` (requests/s that met `slo`) is there only where `slo` bounds something.
    """
    done = completed_requests(record)
    last = max((request.token_times[-1] for request in record.requests if request.token_times), default=ledger.t1)
    duration = max(last, ledger.t1) - ledger.t0
    tokens_in = sum(request.prompt_tokens for request in done)
    tokens_out = sum(request.output_tokens for request in done)

    def rate(count: int) -> float:
        return count / duration if duration > 0 else 0.0

    summary: dict[str, Any] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(record.requests) - len(done),
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "request_throughput": rate(len(done)),
        "output_throughput": rate(tokens_out),
        "total_token_throughput": rate(tokens_in + tokens_out),
    }
    for name, values in latencies(done).items():
        summary |= _statistics(name, values)

    seconds = ledger.seconds_by_cause()
    bubbles = [ledger.bubble_of_request(request.request) * 1e3 for request in done]
    span = ledger.span_seconds
    times = [lane.seconds for lane in ledger.lanes if len(lane.step)]
    summary |= {
        "bubble_fraction": ledger.bubble_fraction,
        "bubble_fraction_inner": ledger.bubble_fraction_inner,
        "bubble_seconds": {str(cause): value for cause, value in seconds.items()},
        "starved_seconds": sum(seconds[cause] for cause in STARVED),
        "median_bubble_ms_per_request": float(np.median(bubbles)) if bubbles else 0.0,
        "stage_busy_fraction": [
            ledger.busy_seconds(stage) / span if span > 0 else 0.0 for stage in range(ledger.num_stages)
        ],
        "micro_batches": len(record.steps),
        "mean_tokens_per_micro_batch": (
            sum(step.num_tokens for step in record.steps) / len(record.steps) if record.steps else 0.0
        ),
        "cv_stage_time": float(np.mean([variation(values) for values in times])) if times else 0.0,
        "peak_kv_fraction": (
            max((step.kv_blocks_used for step in record.steps), default=0) / record.num_blocks
            if record.num_blocks
            else 0.0
        ),
        "preemptions": sum(request.preemptions for request in record.requests),
        "prediction_error": prediction_error(prediction_ratios(record, ledger)),
        "notes": list(record.notes),
    }
    if slo is not None and has_bound(slo):
        summary["request_goodput"] = rate(sum(meets(request, slo) for request in done))
    return summary


def request_row(request: RequestRecord, ledger: Ledger) -> dict[str, Any]:
    """A row of `requests.csv`: times in ms, arrival in seconds from the run's start, None where not reached."""
    gaps = tokens_apart(request) * 1e3
    ttft = time_to_first_token(request)
    return {
        "request": request.request,
        "prompt_tokens": request.prompt_tokens,
        "output_tokens": request.output_tokens,
        "arrival_s": round(request.arrival - ledger.t0, 6),
        "ttft_ms": None if ttft is None else round(ttft * 1e3, 3),
        "mean_tbt_ms": round(float(gaps.mean()), 3) if len(gaps) else None,
        "max_tbt_ms": round(float(gaps.max()), 3) if len(gaps) else None,
        "e2el_ms": round((request.token_times[-1] - request.arrival) * 1e3, 3) if request.token_times else None,
        "bubble_ms": round(ledger.bubble_of_request(request.request) * 1e3, 3),
        "preemptions": request.preemptions,
        "finish_reason": request.finish_reason,
    }


def _statistics(name: str, values: Floats) -> dict[str, float]:
    if not len(values):
        values = np.zeros(1)
    p90, p99 = np.percentile(values, [90, 99])
    found = {"mean": values.mean(), "median": np.median(values), "std": values.std(), "p90": p90, "p99": p99}
    return {f"{statistic}_{name}_ms": float(value) for statistic, value in found.items()}


def variation(values: Floats) -> float:
    """Coefficient of variation: standard deviation over mean; 0 of nothing."""
    mean = float(values.mean()) if len(values) else 0.0
    return float(values.std()) / mean if mean > 0 else 0.0
