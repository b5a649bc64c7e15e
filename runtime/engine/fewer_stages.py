"""The plan of a run whose pipeline goes on with fewer stages, since a fault has left no place for one."""

from __future__ import annotations

from dataclasses import replace

from ...conf.errors import ConfigError
from ...conf.policies import EqualTimeConfig
from ...conf.schema import EngineConfig
from .plan import Plan, make_plan


def plan_fewer_stages(config: EngineConfig, plan: Plan, num_stages: int) -> tuple[EngineConfig, Plan]:
    """Split the layers of a run anew over `num_stages` stages, and plan their KV blocks.

    Args:
        config: of the run before.
        plan: the same; requests that fitted into it must still fit.
        num_stages: of the smaller pipeline.

    Raises:
        ConfigError: the model, or a request of any length that was accepted, does not fit.
    """
    scheduler = config.scheduler
    if isinstance(scheduler, EqualTimeConfig):
        scheduler = replace(scheduler, profile=None)  # it holds times of other stages
    parallel = replace(config.parallel, pp=num_stages, layers=None, stage_speeds=None)
    config = replace(config, parallel=parallel, scheduler=scheduler)
    new = make_plan(config, quiet=True)
    if new.room < plan.room:
        raise ConfigError(
            f"parallel.pp={num_stages}: its KV cache holds requests of {new.room} tokens at most, and "
            f"requests of up to {plan.room} were accepted"
        )
    return config, new
