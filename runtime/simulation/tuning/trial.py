"""Trials: whether a setting carries a request rate. A trial needs no ledger and writes no run folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ....conf.tuning import TailSlo
from ...core.latencies import p99, time_to_first_token, tokens_apart
from ...core.micro_batch_columns import Floats
from ...core.numbers import ms_text
from ...core.request_record import RequestRecord
from ..pipeline.replicas import Replica
from ..pipeline.run import start
from ..pipeline.setting import Setting
from .demand import Demand

_CHECK_INTERVAL = 256  # events of the simulation between two checks of whether the SLO can still be met
_MAX_GROWTH = 0.05  # of TTFT over a run, as a share of the time in which all requests arrive
_TAIL = 0.99  # the quantile that the SLO bounds


@dataclass(frozen=True, slots=True)
class Trial:
    """The outcome of a setting at one request rate.

    Attributes:
        rate: Requests/s; for a closed loop, the rate that it reached.
        why: Why the rate is not carried; empty if it is.
        requests: Requests that were simulated. They are fewer than the workload's if the run was cut short.
        ttft_p99_ms: p99 of TTFT; None if the run was cut short.
        tbt_p99_ms: p99 of TBT; None if the run was cut short.
        running: Maximum number of requests that ran at once on a replica; None if the run was cut short.
    """

    rate: float
    why: str
    requests: int
    ttft_p99_ms: float | None = None
    tbt_p99_ms: float | None = None
    running: int | None = None

    @property
    def carried(self) -> bool:
        """Whether the setting carries the rate."""
        return not self.why


def try_rate(
    setting: Setting, demand: Demand, rate: float, slo: TailSlo, seed: int = 0, *, to_end: bool = False
) -> Trial:
    """Simulate a setting at a request rate, until it is clear that the rate is not carried, or to the end.

    A rate is carried if the p99 of TTFT and of TBT are within the SLO and requests do not pile up. A closed loop sets
    its rate itself.

    Args:
        setting: The setting.
        demand: The requests.
        rate: Requests/s.
        slo: Bounds of the tail latencies.
        seed: Seed of the simulation.
        to_end: Continue when it is clear that the rate is not carried, so that the tails are known.
    """
    fleet, run = start(setting, demand.at(rate), repeat=seed + 1)
    watch = _SloWatch(fleet, demand, slo)
    for number, _ in enumerate(run):
        if not to_end and number % _CHECK_INTERVAL == 0 and (why := watch.violation()):
            return Trial(rate, why, sum(len(replica.record.requests) for replica in fleet))
    requests = [request for replica in fleet for request in replica.record.requests]
    requests.sort(key=lambda request: request.arrival)
    ttft = np.array([time_to_first_token(request) for request in requests], np.float64)
    gaps = np.concatenate([tokens_apart(request) for request in requests])
    tails_ms = p99(ttft * 1e3), p99(gaps * 1e3)
    why = _slo_violation(*tails_ms, slo)
    if demand.clients is None:
        why = why or _piling_up(ttft, float(requests[-1].arrival - requests[0].arrival))
    else:
        rate = len(requests) / (max(request.token_times[-1] for request in requests) - requests[0].arrival)
    running = max(micro_batch.num_running for replica in fleet for micro_batch in replica.record.micro_batches)
    return Trial(rate, why, len(requests), *tails_ms, running)


class _SloWatch:
    """Counts latencies above their bound during a run. Once there are too many, the p99 must be above it too."""

    def __init__(self, fleet: Sequence[Replica], demand: Demand, slo: TailSlo) -> None:
        self._fleet = fleet
        self._slo = slo
        self._max_late = _max_above(len(demand))
        self._max_long_gaps = _max_above(demand.num_gaps)
        self._counted: set[int] = set()  # requests that have ended and whose gaps are counted
        self._long_gaps = 0

    def violation(self) -> str:
        """Return why the SLO can no longer be met; empty while it can."""
        ttft_s, tbt_s = _seconds(self._slo.ttft_p99_ms), _seconds(self._slo.tbt_p99_ms)
        late = 0
        for replica in self._fleet:
            now = replica.pipeline.clock.now()
            for request in replica.record.requests:
                first = request.token_times[0] if request.token_times else now
                late += first - request.arrival > ttft_s
                if request.finished is not None and request.request not in self._counted:
                    self._counted.add(request.request)
                    self._long_gaps += _num_long_gaps(request, tbt_s)
        if late > self._max_late:
            return f"p99 TTFT above {ms_text(self._slo.ttft_p99_ms)}"
        if self._long_gaps > self._max_long_gaps:
            return f"p99 TBT above {ms_text(self._slo.tbt_p99_ms)}"
        return ""


def _num_long_gaps(request: RequestRecord, bound: float) -> int:
    """Count a request's times between tokens that are above `bound` seconds."""
    times = request.token_times
    return sum([b - a > bound for a, b in pairwise(times)]) if bound < np.inf else 0


def _max_above(num: int) -> int:
    """Return how many of `num` values can be above a bound while their p99 is not."""
    return num - 1 - int(_TAIL * max(0, num - 1))


def _seconds(bound_ms: float | None) -> float:
    return np.inf if bound_ms is None else bound_ms / 1e3


def _slo_violation(ttft_ms: float, tbt_ms: float, slo: TailSlo) -> str:
    """Return which tail latency exceeds its bound; empty if none does."""
    for name, tail_ms, bound_ms in (("TTFT", ttft_ms, slo.ttft_p99_ms), ("TBT", tbt_ms, slo.tbt_p99_ms)):
        if bound_ms is not None and tail_ms > bound_ms:
            return f"p99 {name} {ms_text(tail_ms)}, above {ms_text(bound_ms)}"
    return ""


def _piling_up(ttft: Floats, span: float) -> str:
    """Return that requests pile up, since they arrive faster than they are served; empty if they do not.

    Args:
        ttft: TTFT of each request in the order of arrival, in seconds. The last tenth is compared with the first.
        span: Seconds over which the requests arrive.
    """
    tenth = max(1, len(ttft) // 10)
    growth = float(ttft[-tenth:].mean() - ttft[:tenth].mean())
    return f"the queue grows: TTFT rises by {ms_text(growth * 1e3)}" if growth > _MAX_GROWTH * span else ""
