"""One setting at one request rate: whether it carries it, without a ledger and a run folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from ...conf.schema import SimulateConfig
from ...conf.tuning import TailSlo
from ..core.request_record import RequestRecord
from ..cost.make import make_costs
from ..cost.stage_costs import StageCosts
from ..engine.plan import Plan, make_plan
from ..ledger.fleet import Fleet
from ..ledger.ledger import Floats
from ..ledger.summary import time_to_first_token, tokens_apart
from ..report.formatting import ms_text
from ..simulation.replicas import Replica, make_replicas, run_fleet
from .demand import Demand

_LOOK_EVERY = 256  # events between looks at whether the SLO is broken for good
_LAG = 0.05  # of the time that requests come in: a rate is sustained if TTFT grows by no more
_TAIL = 0.99


@dataclass(frozen=True, slots=True)
class Setting:
    """A config that fits, with its plan and its stage times."""

    config: SimulateConfig
    plan: Plan
    costs: StageCosts


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of a setting at `rate` requests/s. `why` it is not carried: empty where it is.

    `requests` were simulated: fewer than there are where it was clear before the end. Tails, and the most requests that
    a replica held at once (`running`), are those of the whole run; None where it was cut short.
    """

    rate: float
    why: str
    requests: int
    ttft_p99_ms: float | None = None
    tbt_p99_ms: float | None = None
    running: int | None = None

    @property
    def carried(self) -> bool:
        return not self.why


def make_setting(config: SimulateConfig) -> Setting:
    """A setting of one config.

    Raises:
        ConfigError: what does not fit, in one line.
    """
    plan = make_plan(config)
    return Setting(config, plan, make_costs(config, plan))


def make_fleet(setting: Setting, seed: int = 0) -> list[Replica]:
    """Its replicas, nothing submitted to them."""
    return make_replicas(setting.config, repeat=seed + 1, plan=setting.plan, costs=setting.costs)


def try_rate(setting: Setting, demand: Demand, rate: float, slo: TailSlo, seed: int = 0) -> Trial:
    """Whether the setting carries `demand` at `rate` requests/s: p99 of TTFT and of TBT within `slo`, and requests do
    not pile up. Stops as soon as it is clear that it does not."""
    fleet = make_fleet(setting, seed)
    watch = _Watch(fleet, demand, slo)
    for number, _ in enumerate(_run(setting, fleet, demand, rate)):
        if number % _LOOK_EVERY == 0 and (why := watch.broken()):
            return Trial(rate, why, sum(len(replica.record.requests) for replica in fleet))
    requests = [request for replica in fleet for request in replica.record.requests]
    requests.sort(key=lambda request: request.arrival)
    ttft = np.array([time_to_first_token(request) for request in requests], np.float64)
    gaps = np.concatenate([tokens_apart(request) for request in requests])
    tails_ms = tail(ttft * 1e3), tail(gaps * 1e3) if len(gaps) else 0.0
    why = _why(*tails_ms, slo) or _piling_up(ttft, float(requests[-1].arrival - requests[0].arrival))
    running = max(micro_batch.num_running for replica in fleet for micro_batch in replica.record.micro_batches)
    return Trial(rate, why, len(requests), *tails_ms, running)


def measure(setting: Setting, demand: Demand, rate: float, seed: int = 0) -> dict[str, Any]:
    """The summary of a whole run, as `summary.json` has it."""
    fleet = make_fleet(setting, seed)
    for _ in _run(setting, fleet, demand, rate):
        pass
    return Fleet([replica.record for replica in fleet]).summarize()


def _run(setting: Setting, fleet: Sequence[Replica], demand: Demand, rate: float) -> Iterator[int]:
    return run_fleet(fleet, demand.at(rate).without_prompts(), router=setting.config.simulation.router)


def tail(values: Floats) -> float:
    """The p99, as a run's summary has it."""
    return float(np.percentile(values, 100 * _TAIL))


class _Watch:
    """Counts what is over a bound while a run goes on, until so much is that its p99 must be."""

    def __init__(self, fleet: Sequence[Replica], demand: Demand, slo: TailSlo) -> None:
        self._fleet = fleet
        self._slo = slo
        self._most_late = _most_over(len(demand))
        self._most_gaps = _most_over(demand.num_gaps)
        self._counted: set[int] = set()  # requests that have ended and whose gaps have been counted
        self._gaps_over = 0

    def broken(self) -> str:
        """Why the SLO cannot be met any more; empty while it can."""
        ttft_s, tbt_s = _seconds(self._slo.ttft_p99_ms), _seconds(self._slo.tbt_p99_ms)
        late = 0
        for replica in self._fleet:
            now = replica.pipeline.clock.now()
            for request in replica.record.requests:
                first = request.token_times[0] if request.token_times else now
                late += first - request.arrival > ttft_s
                if request.finished is not None and request.request not in self._counted:
                    self._counted.add(request.request)
                    self._gaps_over += _over(request, tbt_s)
        if late > self._most_late:
            return f"p99 of TTFT over {ms_text(self._slo.ttft_p99_ms)}"
        if self._gaps_over > self._most_gaps:
            return f"p99 of TBT over {ms_text(self._slo.tbt_p99_ms)}"
        return ""


def _over(request: RequestRecord, bound: float) -> int:
    times = request.token_times
    return sum([b - a > bound for a, b in pairwise(times)]) if bound < np.inf else 0


def _most_over(num: int) -> int:
    """How many of `num` values may be over a bound that their p99 keeps, at the most."""
    return num - 1 - int(_TAIL * max(0, num - 1))


def _seconds(bound_ms: float | None) -> float:
    return np.inf if bound_ms is None else bound_ms / 1e3


def _why(ttft_ms: float, tbt_ms: float, slo: TailSlo) -> str:
    for name, tail_ms, most_ms in (("TTFT", ttft_ms, slo.ttft_p99_ms), ("TBT", tbt_ms, slo.tbt_p99_ms)):
        if most_ms is not None and tail_ms > most_ms:
            return f"p99 of {name} {ms_text(tail_ms)}, over {ms_text(most_ms)}"
    return ""


def _piling_up(ttft: Floats, span: float) -> str:
    """Requests that come faster than they are served wait longer and longer: the last tenth against the first, in the
    order of their arrival over `span` seconds."""
    tenth = max(1, len(ttft) // 10)
    growth = float(ttft[-tenth:].mean() - ttft[:tenth].mean())
    return f"requests pile up: TTFT grows by {ms_text(growth * 1e3)}" if growth > _LAG * span else ""
