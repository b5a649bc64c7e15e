"""Config of `gapless capacity` and `gapless tune`: the tail latency SLO and the search space."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from .errors import ConfigError, check
from .policies import SchedulerConfig
from .ranges import AT_LEAST_ONE, POSITIVE, Within, check_ranges
from .schema import CacheConfig, EngineConfig
from .simulation import SimulationConfig
from .workloads import FixedConfig, WorkloadConfig

_MAX_SEEDS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class TailSlo:
    """Tail latency SLO of a run; at least one bound, except in a closed loop."""

    ttft_p99_ms: Annotated[float | None, POSITIVE] = None
    """bound on the p99 of TTFT over requests; null: no bound"""
    tbt_p99_ms: Annotated[float | None, POSITIVE] = None
    """bound on the p99 of TBT over all token gaps; null: no bound"""

    def __post_init__(self) -> None:
        check_ranges(self, "slo.")


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityConfig(EngineConfig):
    """`gapless capacity`: the maximum request rate of each policy within the SLO, on the same workloads."""

    workload: WorkloadConfig = field(default_factory=FixedConfig)
    policies: tuple[SchedulerConfig, ...] = ()
    """configs of the compared policies, set by scheduler=NAME,NAME; empty: only scheduler"""
    cache: CacheConfig = field(default_factory=lambda: CacheConfig(block_size=16))
    simulation: SimulationConfig = field(default_factory=SimulationConfig)
    slo: TailSlo
    engine: str | None = None
    """engine whose defaults are used; choose it by engine=NAME"""
    seeds: Annotated[int, Within(1, 30)] = 3
    """number of workloads: different random draws, or different sections of a trace"""
    max_seeds: int | None = None
    """maximum seeds, used while the best settings are statistically tied; null: twice seeds, or 1 if seeds is 1"""
    precision: Annotated[float, Within(0.0001, 0.5)] = 0.01
    """relative precision of a capacity"""

    def __post_init__(self) -> None:
        EngineConfig.__post_init__(self)
        are_seeds = self.max_seeds is None or self.seeds <= self.max_seeds <= _MAX_SEEDS
        check("max_seeds", self.max_seeds, are_seeds, f"null or {self.seeds} (seeds) to {_MAX_SEEDS}")
        if self.workload.max_concurrency is None:
            self._check_open()
        else:
            rate = self.workload.request_rate
            check("workload.request_rate", rate, rate is None, "null in a closed loop (max_concurrency)")
        pool, right = (
            self.simulation.disaggregation.prefill_replicas,
            "null; only gapless simulate supports prefill pools",
        )
        check("simulation.disaggregation.prefill_replicas", pool, pool is None, right)

    def _check_open(self) -> None:
        """Check the requirements of an open-loop search for a request rate."""
        if self.slo.ttft_p99_ms is None and self.slo.tbt_p99_ms is None:
            raise ConfigError("slo: set slo.ttft_p99_ms, slo.tbt_p99_ms or both")
        for key, none in (("duration_s", None), ("warmup_requests", 0)):
            value = getattr(self.workload, key)
            check(
                f"workload.{key}",
                value,
                value == none,
                f"{'null' if none is None else none}; only a closed loop supports it",
            )

    @property
    def most_seeds(self) -> int:
        """Maximum number of seeds."""
        if self.max_seeds is not None:
            return self.max_seeds
        return 2 * self.seeds if self.seeds > 1 else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchConfig:
    """Search space of `gapless tune`; each setting has as many replicas as fit on the devices."""

    tp: tuple[int, ...] | None = None
    """tensor-parallel sizes to try; null: all divisors of a node's devices"""
    pp: tuple[int, ...] | None = None
    """pipeline-parallel sizes to try; null: all divisors of the number of devices"""
    replicas: tuple[int, ...] | None = None
    """numbers of replicas to try; null: any that uses all devices"""
    expert_parallel: tuple[bool, ...] = (False, True)
    """expert layouts of an MoE model to try: tensor-parallel experts (false), expert parallelism (true)"""
    chunk: tuple[int, ...] = (128, 256, 512, 1024, 2048)
    """chunks of sarathi and equal_time, and budgets of token_budget, to try"""
    depth: tuple[int, ...] = (0, 1)
    """micro-batches in flight beyond pp to try, in addition to the policy's default"""
    layers: bool = True
    """also try unbalanced layer splits that make the slowest stage faster"""
    batch: bool = True
    """also try the batch size at which requests of mean length fill the KV cache, besides scheduler.max_batch"""
    finalists: Annotated[int, AT_LEAST_ONE] = 3
    """settings that are measured on all seeds"""
    exhaustive: bool = False
    """evaluate every setting instead of searching; slow, to validate the search"""

    def __post_init__(self) -> None:
        check_ranges(self, "search.")
        for key, least in (("tp", 1), ("pp", 1), ("replicas", 1), ("chunk", 1), ("depth", 0)):
            values = getattr(self, key)
            right = values is None or (len(values) > 0 and min(values) >= least)
            shown = values if values is None else list(values)
            check(f"search.{key}", shown, right, f"a list of values of {least} or more")
        layouts = list(self.expert_parallel)
        check("search.expert_parallel", layouts, len(layouts) > 0, "false, true or both")


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneConfig(CapacityConfig):
    """`gapless tune`: the setting of a model on `nodes` nodes with the highest request rate within the SLO."""

    INSTEAD: ClassVar[Mapping[str, str]] = {
        "parallel": "search.tp=[8] search.pp=[2]",
        "parallel.tp": "search.tp=[8]",
        "parallel.pp": "search.pp=[2]",
        "parallel.expert_parallel": "search.expert_parallel=[true]",
        "parallel.depth": "search.depth=[0]",
        "parallel.layers": "search.layers=false",
        "parallel.stage_speeds": "hardware=NAME",
        "scheduler.chunk": "search.chunk=[512]",
        "scheduler.max_batched_tokens": "search.chunk=[512]",
        "scheduler.batch": "search.batch=false",
        "simulation.replicas": "search.replicas=[2]",
        "simulation.devices": "hardware=NAME",
    }

    nodes: Annotated[int, Within(1, 65_536)] = 1
    """number of nodes, each with cluster.devices_per_node devices"""
    search: SearchConfig = field(default_factory=SearchConfig)
