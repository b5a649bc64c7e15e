"""Analyses a run's arrivals: whether a queue grew, the sustainable rate, and closed-loop clients."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...core.request_record import RequestRecord
from ...core.run_record import RunRecord
from ..ledger.ledger import Ledger

_LEAST = 12  # requests
_CLOSED = 0.95  # share of arrivals that bring the unfinished requests exactly to their maximum, in a closed loop
_LEAST_GROWTH = 2.5  # least growth of the queue, in standard deviations of a Poisson count of arrivals
_MOST_TIMED = 200  # requests sampled for the latency without a queue


def overload_of(record: RunRecord, ledger: Ledger) -> tuple[float, dict[str, float]]:
    """Return how long a run continued after its last arrival because of a growing queue, and the evidence.

    It is 0 for a closed loop, for requests that all arrive at once, and if the last request finishes without delay.

    Returns:
        Seconds, 0 if the queue did not grow; numbers by name, rates in requests/s.
    """
    requests = sorted((each for each in record.requests if each.token_times), key=lambda each: each.arrival)
    if len(requests) < _LEAST:
        return 0.0, {}
    arrivals = np.array([each.arrival for each in requests], np.float64)
    ends = np.sort([each.token_times[-1] for each in requests])
    apart, half = float(arrivals[-1] - arrivals[0]), len(requests) // 2
    unfinished = np.arange(1, len(requests) + 1) - np.searchsorted(ends, arrivals)  # at each arrival
    if apart <= 0 or unfinished[-1] - unfinished[half] < _LEAST_GROWTH * half**0.5:
        return 0.0, {}
    arrived, served = (len(requests) - 1) / apart, len(requests) / float(ends[-1] - arrivals[0])
    late = float(ends[-1] - arrivals[-1]) - _without_queue(requests)
    if late <= 0 or arrived <= served:
        return 0.0, {}
    return late, {
        "arrived_per_s": arrived,
        "served_per_s": served,
        "unfinished": float(unfinished[-1]),
        "late_s": float(ledger.t1 - arrivals[-1]),
    }


def clients_of(record: RunRecord) -> dict[str, float]:
    """Return the number of closed-loop clients, and their think time: from an answer to the next request.

    Empty if arrivals do not wait for answers. `think_s` is the median in seconds.
    """
    requests = [each for each in record.requests if each.token_times]
    arrivals, ends = (
        np.sort(times) for times in ([r.arrival for r in requests], [r.token_times[-1] for r in requests])
    )
    before = np.searchsorted(ends, arrivals, side="right")  # requests finished before each arrival
    unfinished = np.arange(1, len(requests) + 1) - before
    most = int(unfinished.max(initial=0))
    later = slice(most, None)
    if len(requests) < max(_LEAST, 2 * most) or np.mean(unfinished[later] == most) < _CLOSED:
        return {}
    return {"clients": most, "think_s": float(np.median(arrivals[later] - ends[before[later] - 1]))}


def _without_queue(requests: Sequence[RequestRecord]) -> float:
    """Return the latency of a median request with TTFT and TBT at their 10th percentiles, in seconds."""
    some = requests[:: -(-len(requests) // _MOST_TIMED)]
    first = np.quantile([each.token_times[0] - each.arrival for each in some], 0.1)
    between = np.concatenate([np.diff(each.token_times) for each in some])
    usual = float(np.median([len(each.token_times) for each in some])) - 1
    return float(first) + (usual * float(np.quantile(between, 0.1)) if len(between) else 0.0)
