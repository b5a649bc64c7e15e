"""The engine core shared by `LLM` and the server: a pipeline and its coordinator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...conf.policies import SchedulerConfig
from ...conf.sampling import SamplingParams
from ...conf.schema import EngineConfig
from ...models.memory import BYTES
from ..core.request import Request
from ..core.stage_floor import StageFloor
from ..pipeline.protocol import LivePipeline
from ..scheduler.base import Scheduler
from ..scheduler.policies import make_scheduler
from .coordinator import Coordinator, StopCheck
from .fewer_stages import plan_fewer_stages
from .plan import Plan, make_plan
from .stage_floors import stage_floors


class EngineCore:
    """A pipeline and the coordinator that drives it.

    If a fault leaves no room for a stage, `config` and `plan` are replaced for the remaining stages, and the
    coordinator continues with a scheduler for them.

    Args:
        config: the run's config.
        plans: plans of `config` made so far, by policy.
        pipeline: running.
        stop_check: passed to the coordinator.
    """

    def __init__(
        self,
        config: EngineConfig,
        plans: Mapping[SchedulerConfig, Plan],
        pipeline: LivePipeline,
        stop_check: StopCheck | None = None,
    ) -> None:
        self.config = config
        self.pipeline = pipeline
        self._plans = dict(plans)
        self._stop_check = stop_check
        self.plan = self._plan_of(config.scheduler)
        self.coordinator = self._make_coordinator()

    def reset(self, policy: SchedulerConfig | None = None, *, warm: bool = False) -> None:
        """Begin a new record, under another policy if one is given. All requests must have ended.

        With `warm`, the policy's state and the prefix cache are kept.
        """
        last = self.coordinator
        while last.has_work:  # aborted requests still in the pipeline
            last.step(last.clock.now() + 1.0)
        if warm:
            last.begin_record()
            return
        if policy is not None:
            self.config = replace(self.config, scheduler=policy)
            self.plan = self._plan_of(policy)
        self.coordinator = self._make_coordinator(last.next_micro_batch, last.epoch)
        self.coordinator.scheduler.dropped = last.scheduler.dropped

    def make_request(
        self,
        number: int,
        prompt: Sequence[int],
        params: SamplingParams,
        arrival: float,
        *,
        index: int = 0,
        user: str = "",
        cache_salt: str = "",
        deadline: float | None = None,
        priority: int = 0,
        output: Sequence[int] = (),
    ) -> Request:
        """Make the request for one output; `index` counts the outputs of a prompt that share a seed.

        Without a seed in `params`, the seed derives from the run's seed and the request's number.
        """
        return Request(
            number,
            prompt,
            params,
            arrival=arrival,
            seed=(self.config.seed << 32) + number if params.seed is None else params.seed + index,
            max_model_len=self.plan.max_model_len,
            eos_token_ids=self.plan.arch.eos_token_ids,
            user=user,
            cache_salt=cache_salt,
            deadline=deadline,
            priority=priority,
            output=output,
        )

    def _plan_of(self, policy: SchedulerConfig) -> Plan:
        """Return the plan of a policy, on the running pipeline."""
        if policy not in self._plans:
            self._plans[policy] = make_plan(replace(self.config, scheduler=policy), quiet=True)
        plan, pipeline = self._plans[policy], self.pipeline
        depth = plan.limits.depth.within(pipeline.depth)
        limits = replace(plan.limits, depth=depth, looks_ahead=pipeline.looks_ahead)
        return replace(plan, num_blocks=pipeline.num_blocks, limits=limits)

    def _make_scheduler(self) -> Scheduler:
        return make_scheduler(self.config.scheduler, self.plan.limits, self.plan.make_pool())

    def _make_coordinator(self, first_micro_batch: int = 0, epoch: int = 0) -> Coordinator:
        return Coordinator(
            self.pipeline,
            self._make_scheduler(),
            on_fewer_stages=self._go_on_with,
            stop_check=self._stop_check,
            first_micro_batch=first_micro_batch,
            epoch=epoch,
            floors=self._floors(),
        )

    def _floors(self) -> list[StageFloor]:
        plan, cache_dtype = self.plan, self.config.cache.dtype
        return stage_floors(
            *(plan.arch, plan.layers, self.pipeline.machines),
            tp=self.config.parallel.tp,
            dtype_bytes=BYTES[plan.dtype],
            formats=plan.formats,
            cache_dtype=cache_dtype,
        )

    def _go_on_with(self, num_stages: int) -> Scheduler:
        self.config, plan = plan_fewer_stages(self.config, self.plan, num_stages)
        self._plans = {self.config.scheduler: plan}
        self.plan = self._plan_of(self.config.scheduler)
        return self._make_scheduler()
