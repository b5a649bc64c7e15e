"""Whether more requests came than were served: for how long the queue made the run longer, and what rate would hold."""

from __future__ import annotations

import numpy as np

from ..core.run_record import RunRecord
from ..ledger.ledger import Ledger

_LEAST = 12  # requests
_EARLY = 0.2  # share of the requests, the first, whose latency counts as that without a queue
_MIDDLE = (0.1, 0.9)  # shares of the requests between whose ends the rate served is taken
_HOLDS = 0.95  # of the rate served: a queue at that rate alone may still grow for long


def overload_of(record: RunRecord, ledger: Ledger) -> tuple[float, dict[str, float]]:
    """Return the seconds for which a run went on after its last arrival since a queue had grown, and what shows it.

    A closed loop, requests that all come at once, and a run that ends about as soon as its last request can, have none.

    Returns:
        Seconds of the run, 0 where the queue did not grow; numbers by name, rates in requests/s.
    """
    requests = sorted((each for each in record.requests if each.finished is not None), key=lambda each: each.arrival)
    if len(requests) < _LEAST:
        return 0.0, {}
    arrivals = np.array([each.arrival for each in requests], np.float64)
    ends = np.array([each.finished for each in requests], np.float64)
    latency, apart = ends - arrivals, float(arrivals[-1] - arrivals[0])
    early = max(1, round(_EARLY * len(requests)))
    low, high = np.quantile(np.sort(ends), _MIDDLE)
    if apart <= 0 or high <= low:
        return 0.0, {}
    arrived, served = (len(requests) - 1) / apart, (_MIDDLE[1] - _MIDDLE[0]) * len(requests) / float(high - low)
    waited = np.array([each.first_dispatched or each.arrival for each in requests]) - arrivals
    unfinished = np.arange(1, len(requests) + 1) - np.searchsorted(np.sort(ends), arrivals)  # when each arrives
    grows = np.median(unfinished[-early:]) > 1.5 * np.median(unfinished[len(requests) // 3 : len(requests) // 2])
    late = float(ends[-1] - arrivals[-1] - np.median(latency[:early]))
    if late <= 0 or arrived <= served or not grows:
        return 0.0, {}
    evidence = {
        "arrived_per_s": arrived,
        "served_per_s": served,
        "holds_per_s": _HOLDS * served,
        "unfinished": float(unfinished[-1]),
        "waited_s": float(np.max(waited)),
        "late_s": float(ledger.t1 - arrivals[-1]),
    }
    return late, evidence
