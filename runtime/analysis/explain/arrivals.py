"""What a run's arrivals say: a queue that grew, the rate that would hold, and clients that wait for their answers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..core.request_record import RequestRecord
from ..core.run_record import RunRecord
from ..ledger.ledger import Ledger

_LEAST = 12  # requests
_CLOSED = 0.95  # of the arrivals, that make just as many unfinished requests as there are at most
_LEAST_GROWTH = 2.5  # standard deviations of a count of random arrivals, by which the queue must have grown
_MOST_TIMED = 200  # requests whose token times say how long one takes without a queue


def overload_of(record: RunRecord, ledger: Ledger) -> tuple[float, dict[str, float]]:
    """Return the seconds for which a run went on after its last arrival since a queue had grown, and what shows it.

    A closed loop, requests that all come at once, and a run that ends about as soon as its last request can, have none.

    Returns:
        Seconds of the run, 0 where the queue did not grow; numbers by name, rates in requests/s.
    """
    requests = sorted((each for each in record.requests if each.token_times), key=lambda each: each.arrival)
    if len(requests) < _LEAST:
        return 0.0, {}
    arrivals = np.array([each.arrival for each in requests], np.float64)
    ends = np.sort([each.token_times[-1] for each in requests])
    apart, half = float(arrivals[-1] - arrivals[0]), len(requests) // 2
    unfinished = np.arange(1, len(requests) + 1) - np.searchsorted(ends, arrivals)  # when each arrives
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
    """Return how many requests clients keep unfinished, and how long they take from an answer to the next request.

    Empty where requests come without waiting for answers. `think_s` is in seconds, in the median.
    """
    requests = [each for each in record.requests if each.token_times]
    arrivals, ends = (
        np.sort(times) for times in ([r.arrival for r in requests], [r.token_times[-1] for r in requests])
    )
    before = np.searchsorted(ends, arrivals, side="right")  # answers that were there when each came
    unfinished = np.arange(1, len(requests) + 1) - before
    most = int(unfinished.max(initial=0))
    later = slice(most, None)
    if len(requests) < max(_LEAST, 2 * most) or np.mean(unfinished[later] == most) < _CLOSED:
        return {}
    return {"clients": most, "think_s": float(np.median(arrivals[later] - ends[before[later] - 1]))}


def _without_queue(requests: Sequence[RequestRecord]) -> float:
    """Return the seconds of a usual request if its first token and the others come as early as the earliest tenth."""
    some = requests[:: -(-len(requests) // _MOST_TIMED)]
    first = np.quantile([each.token_times[0] - each.arrival for each in some], 0.1)
    between = np.concatenate([np.diff(each.token_times) for each in some])
    usual = float(np.median([len(each.token_times) for each in some])) - 1
    return float(first) + (usual * float(np.quantile(between, 0.1)) if len(between) else 0.0)
