"""A validated simulation, ready to run: a config with its plan, stage times and host times."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ....conf.build import load_hardware
from ....conf.disaggregation import DisaggregationConfig
from ....conf.errors import ConfigError
from ....conf.policies import TokenBudgetConfig
from ....conf.schema import SimulateConfig
from ...core.stage_floor import StageFloor
from ...engine.plan import Plan, make_plan
from ..cost.error import CostError, widest
from ..cost.operators import HostTimes
from ..cost.stage_costs import StageCosts
from .make_costs import make_control, make_costs, make_error, make_floors


@dataclass(frozen=True, slots=True)
class Setting:
    """A config that fits in memory, with its plan and its cost model.

    `costs` predicts stage times per micro-batch, `control` holds the host times between micro-batches, and `error` is
    the error range of `costs` (None: not known). With a prefill pool, `prefill` is its setting, and this one is the
    decode pool's. `floors` are the work of its stages.
    """

    config: SimulateConfig
    plan: Plan
    costs: StageCosts
    control: HostTimes
    error: CostError | None
    prefill: Setting | None = None
    floors: list[StageFloor] = field(default_factory=list)

    def with_times(self, scale: float) -> Setting:
        """Return the setting with all stage times multiplied by `scale`."""
        prefill = self.prefill and self.prefill.with_times(scale)
        return replace(self, costs=self.costs.scaled(scale), prefill=prefill)


def make_setting(config: SimulateConfig) -> Setting:
    """Make the setting of one config.

    Raises:
        ConfigError: the model does not fit, or the hardware has no stage times, or no links between pools.
    """
    setting = _setting_of(config)
    if not config.simulation.disaggregation.is_on:
        return setting
    try:
        prefill = _setting_of(_prefill_config(config))
    except ConfigError as error:
        raise ConfigError(f"in the prefill pool (simulation.disaggregation): {error}") from error
    for hardware in (prefill.config.hardware, config.hardware):
        if hardware.costs is None:
            raise ConfigError(
                f"hardware={hardware.name}: has no link constants for the KV transfers of "
                "simulation.disaggregation; use hardware=a100-80g"
            )
    return replace(
        setting,
        plan=replace(setting.plan, prefix_caching=False),
        error=widest([prefill.error, setting.error]),
        prefill=prefill,
    )


def _setting_of(config: SimulateConfig) -> Setting:
    plan = make_plan(config)
    costs, control = make_costs(config, plan), make_control(config, plan)
    return Setting(config, plan, costs, control, make_error(config, plan), floors=make_floors(config, plan))


def _prefill_config(config: SimulateConfig) -> SimulateConfig:
    """Return the config of the prefill pool: its own replicas, grid, hardware and policy, all else unchanged."""
    pool, parallel, scheduler = config.simulation.disaggregation, config.parallel, config.scheduler
    assert pool.prefill_replicas is not None
    tp, pp = pool.prefill_tp or parallel.tp, pool.prefill_pp or parallel.pp
    is_same_grid = (tp, pp) == (parallel.tp, parallel.pp) and pool.prefill_hardware is None
    hardware = config.hardware
    if pool.prefill_hardware is not None:
        hardware = load_hardware(pool.prefill_hardware, "simulation.disaggregation.prefill_hardware")
    return replace(
        config,
        hardware=hardware,
        parallel=replace(
            parallel,
            launcher=None,
            tp=tp,
            pp=pp,
            layers=pool.prefill_layers or (parallel.layers if is_same_grid else None),
            stage_speeds=parallel.stage_speeds if is_same_grid else None,
            depth=parallel.depth if is_same_grid else None,
        ),
        scheduler=TokenBudgetConfig(
            max_batched_tokens=pool.prefill_chunk,
            batch=scheduler.batch,
            max_batch=scheduler.max_batch,
            order=scheduler.order,
        ),
        policies=(),
        simulation=replace(config.simulation, replicas=pool.prefill_replicas, disaggregation=DisaggregationConfig()),
    )
