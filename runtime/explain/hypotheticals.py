"""Settings that no key makes: a cause of idle time removed, faster links, a slower node."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ...conf.simulation import FaultsConfig
from ..core.run_record import RunRecord
from ..cost.operators import HostTimes
from ..cost.stage_costs import MicroBatchShape, StageCosts
from ..ledger.causes import UNEVEN_WORK, Cause
from ..ledger.ledger import Ledger
from ..simulation.setting import Setting
from .scaled_operators import scaled_costs

SLOWER = 1.25  # times as long as now that a slower node takes
_LEAST_SHARE = 0.002  # of all stage time that a cause must take to be removed
_MOST_STAGES = 4  # up to which each is tried as the slower one


@dataclass(frozen=True, slots=True)
class Hypothetical:
    """A setting that no key makes.

    Attributes:
        change: in words.
        setting: the run's, changed so.
        is_even: whether noise is gone too: nothing takes longer than something else.
    """

    change: str
    setting: Setting
    is_even: bool = False


def hypotheticals(setting: Setting, record: RunRecord, ledger: Ledger) -> Iterator[Hypothetical]:
    """Yield what is worth knowing of a run: its causes removed where they took time, and other links and nodes."""
    costs, control = setting.costs, setting.control
    least = _LEAST_SHARE * ledger.stage_seconds
    idle = {cause: seconds if seconds >= least else 0.0 for cause, seconds in ledger.seconds_by_cause().items()}
    several = costs.num_stages > 1
    if several and sum(idle[cause] for cause in UNEVEN_WORK) > 0:
        spans = sum(len(lane.seconds) for lane in ledger.lanes)
        mean = sum(float(np.sum(lane.seconds)) for lane in ledger.lanes) / max(1, spans)
        even = replace(setting, costs=EvenCosts(costs, mean))
        yield Hypothetical("every micro-batch takes the mean on every stage", even, is_even=True)
    if several and idle[Cause.TRANSPORT] > 0:
        free = replace(setting, costs=scaled_costs(costs, links=0.0))
        yield Hypothetical("links take no time", free)
        yield Hypothetical("links twice as fast", replace(setting, costs=scaled_costs(costs, links=0.5)))
    if idle[Cause.CONTROL] > 0 and (control.dispatch or control.result or control.turnaround):
        gone = replace(setting, control=HostTimes())
        yield Hypothetical("the coordinator takes no time", gone)
    if setting.config.simulation.faults.are_any and idle[Cause.RECOVERY] > 0:
        simulation = replace(setting.config.simulation, faults=FaultsConfig())
        unbroken = replace(setting, config=replace(setting.config, simulation=simulation))
        yield Hypothetical("no faults", unbroken)
    if idle[Cause.STARVED_KV_FULL] > 0 or any(request.preemptions for request in record.requests):
        plan = replace(setting.plan, num_blocks=2 * setting.plan.num_blocks)
        yield Hypothetical("twice the KV blocks", replace(setting, plan=plan))
    busy = [ledger.busy_seconds(stage) for stage in range(costs.num_stages)]
    stages = range(costs.num_stages) if costs.num_stages <= _MOST_STAGES else [busy.index(max(busy))]
    for stage in stages if several else ():
        times = [SLOWER if each == stage else 1.0 for each in range(costs.num_stages)]
        slower = replace(setting, costs=scaled_costs(costs, stages=times))
        yield Hypothetical(f"stage {stage} takes {SLOWER:g} times as long", slower)


class EvenCosts(StageCosts):
    """Stages that take the same `seconds` for every micro-batch, with the links of `costs`."""

    def __init__(self, costs: StageCosts, seconds: float) -> None:
        super().__init__(costs.layers, costs.operators)
        self._every = [seconds] * costs.num_stages

    def seconds(self, shape: MicroBatchShape) -> list[float]:
        """Return the same seconds for each stage, whatever the micro-batch holds."""
        return list(self._every)
