"""Whether requests met a service level objective."""

from __future__ import annotations

from ....conf.workloads import SloConfig
from ...core.latencies import tokens_apart
from ...core.request_record import RequestRecord


def has_bound(slo: SloConfig) -> bool:
    """Return whether the SLO bounds any latency."""
    return slo != SloConfig()


def meets(request: RequestRecord, slo: SloConfig) -> bool:
    """Return whether a finished request met every bound.

    A request with one output token has no TBT and meets the bounds on it; a request without output tokens meets none.
    """
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
