"""A simulation that fits, ready to run: a config with its plan, its stage times and the host's share."""

from __future__ import annotations

from dataclasses import dataclass

from ...conf.schema import SimulateConfig
from ..cost.make import make_control, make_costs
from ..cost.measured import Control
from ..cost.stage_costs import StageCosts
from ..engine.plan import Plan, make_plan


@dataclass(frozen=True, slots=True)
class Setting:
    """A config that fits, and what follows from it: the plan, the seconds that each stage takes for a micro-batch
    (`costs`), and the host's seconds between micro-batches (`control`)."""

    config: SimulateConfig
    plan: Plan
    costs: StageCosts
    control: Control


def make_setting(config: SimulateConfig) -> Setting:
    """The setting of one config.

    Raises:
        ConfigError: the model does not fit, or no stage times are known of the hardware.
    """
    plan = make_plan(config)
    return Setting(config, plan, make_costs(config, plan), make_control(config, plan.arch))
