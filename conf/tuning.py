"""The keys of `gapless capacity` and `gapless tune`: the SLO on the tails of a run, and the settings to search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from .errors import ConfigError, check, check_each
from .policies import SchedulerConfig
from .schema import CacheConfig, EngineConfig
from .simulation import SimulationConfig
from .workloads import FixedConfig, WorkloadConfig

_MAX_SEEDS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class TailSlo:
    """Bounds that the tails of a run must meet; at least one is given, but for a closed loop."""

    ttft_p99_ms: float | None = None
    """most milliseconds of the p99 of TTFT over the requests; null: no bound"""
    tbt_p99_ms: float | None = None
    """most milliseconds of the p99 of TBT over all gaps between tokens; null: no bound"""

    def __post_init__(self) -> None:
        check_each("slo.", self, lambda ms: ms > 0, "above 0", "ttft_p99_ms", "tbt_p99_ms")


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityConfig(EngineConfig):
    """`gapless capacity`: the highest request rate of each policy that meets the SLO, on the same workloads."""

    workload: WorkloadConfig = field(default_factory=FixedConfig)
    policies: tuple[SchedulerConfig, ...] = ()
    """several policies whole, as scheduler=NAME,NAME makes them; empty: scheduler alone"""
    cache: CacheConfig = field(default_factory=lambda: CacheConfig(block_size=16))
    simulation: SimulationConfig = field(default_factory=SimulationConfig)
    slo: TailSlo
    engine: str | None = None
    """whose defaults were taken; choose them by engine=NAME"""
    seeds: int = 3
    """workloads that are tried: other draws, or other stretches of a trace"""
    max_seeds: int | None = None
    """seeds at most, while the best settings cannot be told apart; null: twice seeds, or 1 if that is 1"""
    precision: float = 0.01
    """a capacity is found to within this share"""

    def __post_init__(self) -> None:
        EngineConfig.__post_init__(self)
        check("seeds", self.seeds, 1 <= self.seeds <= 30, "1 to 30")
        right = f"{self.seeds} (seeds) to {_MAX_SEEDS}"
        check_each("", self, lambda n: self.seeds <= n <= _MAX_SEEDS, right, "max_seeds")
        check("precision", self.precision, 1e-4 <= self.precision <= 0.5, "in [0.0001, 0.5]")
        if self.workload.max_concurrency is None:
            self._check_open()
        else:
            rate = self.workload.request_rate
            check("workload.request_rate", rate, rate is None, "null where clients (max_concurrency) set it")
        pool, right = (
            self.simulation.disaggregation.prefill_replicas,
            "null: gapless simulate has prefill pools, a search has none",
        )
        check("simulation.disaggregation.prefill_replicas", pool, pool is None, right)

    def _check_open(self) -> None:
        """Check what a search for a request rate needs, which a closed loop does not."""
        if self.slo.ttft_p99_ms is None and self.slo.tbt_p99_ms is None:
            raise ConfigError("slo: give slo.ttft_p99_ms, slo.tbt_p99_ms or both; without a bound there is no capacity")
        for key, none in (("duration_s", None), ("warmup_requests", 0)):
            value = getattr(self.workload, key)
            check(f"workload.{key}", value, value == none, f"{'null' if none is None else none}; a closed loop has it")

    @property
    def most_seeds(self) -> int:
        """How many seeds are used at most."""
        if self.max_seeds is not None:
            return self.max_seeds
        return 2 * self.seeds if self.seeds > 1 else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchConfig:
    """The settings that `gapless tune` tries; each has as many replicas as the devices give."""

    tp: tuple[int, ...] | None = None
    """tensor-parallel sizes that are tried; null: all that divide a node's devices"""
    pp: tuple[int, ...] | None = None
    """numbers of stages that are tried; null: all that divide the devices"""
    replicas: tuple[int, ...] | None = None
    """numbers of replicas that are tried, beside tp and pp; null: any that uses all devices"""
    expert_parallel: tuple[bool, ...] = (False, True)
    """what is tried of a mixture of experts: a slice of every expert on each rank (false), whole ones (true)"""
    chunk: tuple[int, ...] = (128, 256, 512, 1024, 2048)
    """chunks of sarathi and equal_time, budgets of token_budget, that are tried"""
    depth: tuple[int, ...] = (0, 1)
    """micro-batches in flight beyond pp that are tried beside the policy's own"""
    layers: bool = True
    """try layer splits beside the balanced one, where they make the slowest stage faster"""
    batch: bool = True
    """try the B at which requests of mean length fill the KV cache, beside scheduler.max_batch"""
    finalists: int = 3
    """settings that get their capacity on all seeds"""
    exhaustive: bool = False
    """the capacity of every setting instead of a search: slow, to judge the search by"""

    def __post_init__(self) -> None:
        for key, least in (("tp", 1), ("pp", 1), ("replicas", 1), ("chunk", 1), ("depth", 0)):
            values = getattr(self, key)
            right = values is None or (len(values) > 0 and min(values) >= least)
            shown = values if values is None else list(values)
            check(f"search.{key}", shown, right, f"a list of values of {least} or more")
        layouts = list(self.expert_parallel)
        check("search.expert_parallel", layouts, len(layouts) > 0, "false, true or both")
        check("search.finalists", self.finalists, self.finalists >= 1, "1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneConfig(CapacityConfig):
    """`gapless tune`: the setting of a model on `nodes` nodes that carries the most requests/s."""

    INSTEAD: ClassVar[Mapping[str, str]] = {
        "parallel": "search.tp=[8] search.pp=[2]",
        "parallel.tp": "search.tp=[8]",
        "parallel.pp": "search.pp=[2]",
        "parallel.expert_parallel": "search.expert_parallel=[true]",
        "parallel.depth": "search.depth=[0]",
        "parallel.layers": "search.layers=false",
        "parallel.stage_speeds": "hardware=NAME",
        "scheduler.chunk": "search.chunk=[512]",
        "scheduler.budget": "search.chunk=[512]",
        "scheduler.batch": "search.batch=false",
        "simulation.replicas": "search.replicas=[2]",
        "simulation.devices": "hardware=NAME",
    }

    nodes: int = 1
    """nodes of the cluster, each with cluster.devices_per_node devices"""
    search: SearchConfig = field(default_factory=SearchConfig)

    def __post_init__(self) -> None:
        CapacityConfig.__post_init__(self)
        check("nodes", self.nodes, 1 <= self.nodes <= 65_536, "1 to 65536")
