"""A simulation that fits, ready to run: a config with its plan, its stage times and the host's share."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...conf.schema import SimulateConfig
from ..cost.error import CostError
from ..cost.make import make_control, make_costs, make_error
from ..cost.operators import HostTimes
from ..cost.stage_costs import StageCosts
from ..engine.plan import Plan, make_plan


@dataclass(frozen=True, slots=True)
class Setting:
    """A config that fits, and what follows from it: the plan, the seconds that each stage takes for a micro-batch
    (`costs`), the host's seconds between micro-batches (`control`), and how far `costs` may be off (`error`; None: not
    known)."""

    config: SimulateConfig
    plan: Plan
    costs: StageCosts
    control: HostTimes
    error: CostError | None

    def with_times(self, scale: float) -> Setting:
        """Return the setting with stage times that are `scale` times as long."""
        return replace(self, costs=self.costs.scaled(scale))


def make_setting(config: SimulateConfig) -> Setting:
    """The setting of one config.

    Raises:
        ConfigError: the model does not fit, or no stage times are known of the hardware.
    """
    plan = make_plan(config)
    costs, control = make_costs(config, plan), make_control(config, plan.arch)
    return Setting(config, plan, costs, control, make_error(config, plan.arch))
