"""What is learned from a run whose stage times no cost model predicts, and settings and pipelines made from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ....conf.architecture import Architecture
from ....conf.errors import ConfigError
from ....conf.schema import SimulateConfig
from ...core.run_record import RunRecord
from ...core.stage_floor import StageFloor
from ...engine.plan import Plan, make_plan
from ...scheduler.limits import Limits
from ...simulation.pipeline.setting import Setting
from ...simulation.pipeline.simulated_pipeline import SimulatedPipeline
from .learned_costs import LayerFit
from .learned_host import LearnedHost
from .noise import BlockBootstrap, DrawnNoise
from .noisy_pipeline import NoisyPipeline
from .observations import Observations

_MFU = 0.8  # of large micro-batches: measured with float32 and AVX-512, 128 to 256 rows
_LEAST = 8  # micro-batches needed to learn from a run


@dataclass(frozen=True, slots=True)
class LearnedRun:
    """The learned stage costs, host times, links and noise of a run.

    Attributes:
        plan: the run's, with its KV blocks and B as recorded.
        is_model_known: the plan has the model's real layers, which can be split differently.
        stalled: seconds of stalls, which replays leave out.
    """

    config: SimulateConfig
    plan: Plan
    fit: LayerFit
    host: LearnedHost
    noise: BlockBootstrap
    is_model_known: bool
    stalled: float = 0.0

    def setting(self, config: SimulateConfig) -> Setting:
        """Return the setting of the run's config, or of a modified one.

        Raises:
            ConfigError: it does not fit, has other stages or ranks, or splits the layers of an unknown model.
        """
        parallel, own = config.parallel, self.config.parallel
        if (parallel.pp, parallel.tp) != (own.pp, own.tp):
            raise ConfigError(
                f"parallel.pp={parallel.pp}, parallel.tp={parallel.tp}: stage times are learned from a run with "
                f"pp={own.pp}, tp={own.tp}; predict other grids with gapless simulate"
            )
        plan = self.plan if config == self.config else self._plan_of(config)
        costs = self.fit.costs([len(each) for each in plan.layers], self.host.links)
        return Setting(config, plan, costs, self.host.times, None)

    def _plan_of(self, config: SimulateConfig) -> Plan:
        is_split_alike = config.parallel.layers == self.config.parallel.layers
        if not self.is_model_known:
            if not is_split_alike:
                raise ConfigError(
                    f"parallel: cannot split the layers differently, as model.weights={config.model.weights} is missing"
                )
            return _plan_without_model(config, self.plan.arch, self.plan.num_blocks, self.plan.limits)
        plan = make_plan(config, quiet=True)
        if is_split_alike and (config.cache, config.hardware) == (self.config.cache, self.config.hardware):
            plan = replace(plan, num_blocks=self.plan.num_blocks)
        return plan

    def pipeline(self, setting: Setting, seed: int | None, *, in_order: bool = False) -> SimulatedPipeline:
        """Return the pipeline of a setting; `seed` draws the run's noise, None: no noise.

        With `in_order` the machine is slow when it was in the run.
        """
        plan, control, config = setting.plan, setting.control, setting.config
        how: dict[str, Any] = {
            "depth": plan.limits.depth.most,
            "num_blocks": plan.num_blocks,
            "draft_acceptance": config.simulation.draft_acceptance if config.scheduler.drafts else None,
            "seed": config.seed + (seed or 0),
        }
        if seed is None:
            how |= {"dispatch_s": control.dispatch, "result_s": control.result, "turnaround_s": control.turnaround}
            return SimulatedPipeline(setting.costs, **how)
        noise = DrawnNoise(self.noise, seed, in_order=in_order)
        return NoisyPipeline(setting.costs, control, noise, least_result=self.host.least_result, **how)


def learn_run(config: SimulateConfig, record: RunRecord) -> LearnedRun:
    """Learn stage, host and link times from the spans of a run.

    Args:
        config: the run's config.
        record: the run's record.

    Raises:
        ConfigError: the run was too short to learn from, or its pipeline lost a stage.
    """
    if record.standing_stages != record.num_stages:
        raise ConfigError("cannot be replayed: its pipeline continued with fewer stages after a fault")
    seen = Observations.of(record)
    if len(seen) < _LEAST:
        raise ConfigError(f"{len(seen)} complete micro-batches: too few to learn stage times from")
    plan, is_known = _recorded_plan(config, record)
    host = LearnedHost.of(record, seen)
    layers = [len(each) for each in plan.layers]
    fit = LayerFit(
        *(seen, layers, plan.arch if is_known else None),
        tile=config.hardware.tile,
        row_seconds=_row_seconds(record.floors, layers),
    )
    costs = fit.costs(layers, host.links)
    predicted = np.array([costs.seconds(shape) for shape in seen.shapes])
    noise = BlockBootstrap(seen, predicted, host)
    stalled = float(((seen.seconds - predicted) * seen.stalls(predicted)).sum())
    return LearnedRun(config, plan, fit, host, noise, is_known, stalled)


def _row_seconds(floors: Sequence[StageFloor], layers: Sequence[int]) -> float:
    """Return the seconds per row and layer in large micro-batches; 0 if the devices' rates are unknown."""
    of_rows = [floor.rows.flops / floor.flops_per_s for floor in floors]
    return sum(of_rows) / sum(layers) / _MFU


def _recorded_plan(config: SimulateConfig, record: RunRecord) -> tuple[Plan, bool]:
    """Return the plan of a run, with KV blocks and B as recorded, and whether its model is known."""
    try:
        plan, is_known = make_plan(config, quiet=True), True
    except ConfigError:
        longest = max(request.prompt_tokens + request.output_tokens for request in record.requests)
        own = config.parallel.layers
        layers = own if isinstance(own, tuple) else (1,) * record.num_stages
        arch = Architecture(
            vocab_size=1,
            hidden_size=1,
            num_layers=sum(layers),
            num_heads=1,
            num_kv_heads=1,
            head_dim=1,
            ffn_size=1,
            max_position=config.model.max_model_len or longest,
        )
        limits = Limits(
            record.batch,
            config.scheduler.depth(record.num_stages, config.parallel.depth),
            tile=config.hardware.tile,
            num_stages=record.num_stages,
        )
        plan, is_known = _plan_without_model(config, arch, record.num_blocks, limits), False
    limits = plan.limits
    if record.batch:
        limits = replace(limits, batch=record.batch, depth=limits.depth.within(record.depth))
    return replace(plan, num_blocks=record.num_blocks, limits=limits), is_known


def _plan_without_model(config: SimulateConfig, arch: Architecture, num_blocks: int, limits: Limits) -> Plan:
    """Return a plan for a model of which at most the number of layers is known."""
    parallel = config.parallel
    counts = parallel.layer_counts(arch.num_layers) or (arch.num_layers // parallel.pp,) * parallel.pp
    ends = np.cumsum(counts).tolist()
    depth = config.scheduler.depth(parallel.pp, parallel.depth)
    slots = num_blocks * config.block_size // arch.max_position
    return Plan(
        arch=arch,
        layers=tuple(range(end - count, end) for count, end in zip(counts, ends, strict=True)),
        num_blocks=num_blocks,
        block_size=config.block_size,
        replicate_embedding=False,
        limits=replace(limits, batch=config.scheduler.batch_of(slots, depth.most), depth=depth),
        tokenizer=None,
        prefix_caching=config.cache.prefix_caching,
    )
