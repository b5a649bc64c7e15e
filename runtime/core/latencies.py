"""Latencies of requests and their statistics."""

from __future__ import annotations

import numpy as np

from .micro_batch_columns import Floats
from .request_record import RequestRecord
from .run_record import RunRecord

NOT_COMPLETED = (None, "abort", "error")  # finish reasons of requests that count as failed
GOES_ON = "goes_on"  # finish reason of a request that outlasts a recorded window; not a failure


def completed_requests(record: RunRecord) -> list[RequestRecord]:
    """Return the requests that finished normally, including those that arrived before a recorded window."""
    reasons = (*NOT_COMPLETED, GOES_ON)
    return [request for request in (*record.requests, *record.crossing) if request.finish_reason not in reasons]


def time_to_first_token(request: RequestRecord) -> float | None:
    """Return the seconds from arrival to the first token; None without one, or if it precedes a recorded window."""
    return request.token_times[0] - request.arrival if request.token_times and not request.earlier_tokens else None


def tokens_apart(request: RequestRecord) -> Floats:
    """Return the seconds between the request's consecutive tokens (TBT, inter-token latency), one fewer than tokens."""
    return np.diff(np.asarray(request.token_times, np.float64))


def latencies(requests: list[RequestRecord]) -> dict[str, Floats]:
    """Return the latencies by name, in milliseconds.

    `ttft`, `tpot` and `e2el` have one value per request (if defined), `itl` one per pair of consecutive tokens.
    Requests that outlast a recorded window have no `e2el`.
    """
    gaps = [tokens_apart(request) for request in requests]
    ttft = [first for request in requests if (first := time_to_first_token(request)) is not None]
    ended = [request for request in requests if request.token_times and request.finish_reason != GOES_ON]
    e2el = [request.token_times[-1] - request.arrival for request in ended]
    seconds = {
        "ttft": np.array(ttft, np.float64),
        "tpot": np.array([gap.mean() for gap in gaps if len(gap)], np.float64),
        "itl": np.concatenate(gaps) if gaps else np.empty(0),
        "e2el": np.array(e2el, np.float64),
    }
    return {name: values * 1e3 for name, values in seconds.items()}


def p99(values: Floats) -> float:
    """Return the 99th percentile of a latency; 0 if there are no values."""
    return float(np.percentile(values, 99)) if len(values) else 0.0


def statistics(values: Floats) -> dict[str, float]:
    """Return the summary statistics of a latency; zeros if there are no values."""
    if not len(values):
        values = np.zeros(1)
    p90, p99 = np.percentile(values, [90, 99])
    found = {"mean": values.mean(), "median": np.median(values), "std": values.std(), "p90": p90, "p99": p99}
    return {statistic: float(value) for statistic, value in found.items()}
