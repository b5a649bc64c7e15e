"""Plans for continuing a run with fewer stages, after a fault left no room for one."""

from __future__ import annotations

from dataclasses import replace

from ...conf.errors import ConfigError
from ...conf.schema import EngineConfig
from .plan import Plan, make_plan


def plan_fewer_stages(config: EngineConfig, plan: Plan, num_stages: int) -> tuple[EngineConfig, Plan]:
    """Re-split the layers of a run over `num_stages` stages, and plan their KV blocks.

    Args:
        config: the current config.
        plan: the current plan; requests that fit it must still fit.
        num_stages: number of stages of the smaller pipeline.

    Raises:
        ConfigError: the model, or a request of any length that was accepted, does not fit.
    """
    parallel = replace(config.parallel, pp=num_stages, layers=None, stage_speeds=None)
    config = replace(config, parallel=parallel)
    new = make_plan(config, quiet=True)
    if new.room < plan.room:
        raise ConfigError(
            f"parallel.pp={num_stages}: its KV cache holds requests of at most {new.room} tokens, but "
            f"requests of up to {plan.room} were accepted"
        )
    return config, new
