"""Settings that no key makes: a cause of idle time removed, faster links, a slower node."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...conf.simulation import FaultsConfig
from ...parallel.placement import StageLink
from ..core.run_record import RunRecord
from ..cost.operators import HostTimes, Linear, Operators
from ..cost.stage_costs import MicroBatchShape, StageCosts
from ..ledger.causes import UNEVEN_WORK, Cause
from ..ledger.ledger import Ledger
from ..simulation.setting import Setting

SLOWER = 1.25  # times as long as now that a slower node takes
_LEAST_SHARE = 0.002  # of all stage time that a cause must take to be removed
_MOST_STAGES = 4  # up to which each is tried as the slower one


@dataclass(frozen=True, slots=True)
class Hypothetical:
    """A setting that no key makes.

    Attributes:
        change: in words.
        setting: the run's, changed so.
        removes: the cause of idle time that is gone; None where none is.
    """

    change: str
    setting: Setting
    removes: Cause | None = None


def hypotheticals(setting: Setting, record: RunRecord, ledger: Ledger) -> Iterator[Hypothetical]:
    """Yield what is worth knowing of a run: its causes removed where they took time, and other links and nodes."""
    costs, control = setting.costs, setting.control
    least = _LEAST_SHARE * ledger.stage_seconds
    idle = {cause: seconds if seconds >= least else 0.0 for cause, seconds in ledger.seconds_by_cause().items()}
    several = costs.num_stages > 1
    if several and sum(idle[cause] for cause in UNEVEN_WORK) > 0:
        spans = sum(len(lane.seconds) for lane in ledger.lanes)
        mean = sum(float(np.sum(lane.seconds)) for lane in ledger.lanes) / max(1, spans)
        even = ChangedCosts(costs, seconds=mean)
        yield Hypothetical("every micro-batch takes the mean on every stage", replace(setting, costs=even))
    if several and idle[Cause.TRANSPORT] > 0:
        free = ChangedCosts(costs, links=0.0)
        yield Hypothetical("links take no time", replace(setting, costs=free), Cause.TRANSPORT)
        yield Hypothetical("links twice as fast", replace(setting, costs=ChangedCosts(costs, links=0.5)))
    if idle[Cause.CONTROL] > 0 and (control.dispatch or control.result or control.turnaround):
        gone = replace(setting, control=HostTimes())
        yield Hypothetical("the coordinator takes no time", gone, Cause.CONTROL)
    if setting.config.simulation.faults.are_any and idle[Cause.RECOVERY] > 0:
        simulation = replace(setting.config.simulation, faults=FaultsConfig())
        unbroken = replace(setting, config=replace(setting.config, simulation=simulation))
        yield Hypothetical("no faults", unbroken, Cause.RECOVERY)
    if idle[Cause.STARVED_KV_FULL] > 0 or any(request.preemptions for request in record.requests):
        plan = replace(setting.plan, num_blocks=2 * setting.plan.num_blocks)
        yield Hypothetical("twice the KV blocks", replace(setting, plan=plan), Cause.STARVED_KV_FULL)
    busy = [ledger.busy_seconds(stage) for stage in range(costs.num_stages)]
    stages = range(costs.num_stages) if costs.num_stages <= _MOST_STAGES else [busy.index(max(busy))]
    for stage in stages if several else ():
        times = [SLOWER if each == stage else 1.0 for each in range(costs.num_stages)]
        slower = replace(setting, costs=ChangedCosts(costs, times=times))
        yield Hypothetical(f"stage {stage} takes {SLOWER:g} times as long", slower)


class ChangedCosts(StageCosts):
    """The stages of a run with other times.

    Args:
        costs: the run's.
        times: of each stage, how many times as long it takes.
        seconds: what each stage takes for every micro-batch; None: as `costs` says.
        links: how many times as long a link takes.
    """

    def __init__(
        self, costs: StageCosts, *, times: Sequence[float] | None = None, seconds: float | None = None,
        links: float = 1.0,
    ) -> None:  # fmt: skip
        changed: dict[int, Operators] = {id(source): ChangedLinks(source, links) for source in costs.operators}
        super().__init__(costs.layers, [changed[id(source)] for source in costs.operators])
        self._costs = costs
        self._times = list(times or [1.0] * costs.num_stages)
        self._every = None if seconds is None else [seconds] * costs.num_stages

    def seconds(self, shape: MicroBatchShape) -> list[float]:
        if self._every is not None:
            return list(self._every)
        return [seconds * times for seconds, times in zip(self._costs.seconds(shape), self._times, strict=True)]

    def scaled(self, scale: float) -> StageCosts:
        raise NotImplementedError("the times of a hypothetical are final")


class ChangedLinks:
    """Operators whose messages take `factor` times as long."""

    def __init__(self, source: Operators, factor: float) -> None:
        self._source = source
        self._factor = factor

    def send(self, rows: int, *, link: StageLink, scatter_gather: bool) -> float:
        return self._factor * self._source.send(rows, link=link, scatter_gather=scatter_gather)

    def linear(self, operator: Linear, rows: int) -> float:
        return self._source.linear(operator, rows)

    def others(self, rows: int) -> float:
        return self._source.others(rows)

    def routing(self, rows: int) -> float:
        return self._source.routing(rows)

    def embedding(self, rows: int) -> float:
        return self._source.embedding(rows)

    def chunk_attention(self, length: int, prefix: int) -> float:
        return self._source.chunk_attention(length, prefix)

    def decode_attention(self, requests: int, context: int) -> float:
        return self._source.decode_attention(requests, context)

    def all_reduce(self, rows: int) -> float:
        return self._source.all_reduce(rows)

    @property
    def host(self) -> HostTimes:
        return self._source.host
