"""Simulation config: stage times, replicas, noise and faults: `simulation.KEY=VALUE`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from .disaggregation import DisaggregationConfig
from .errors import ConfigError, check
from .ranges import AT_LEAST_ONE, NOT_NEGATIVE, POSITIVE, SHARE, Within, check_ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultsConfig:
    """Rank failures of a simulated pipeline, and the duration of recovery.

    The default times were measured with a small model on two CPU cores under Ray (docs/simulate.md); set those of your
    own cluster. `parallel.spares`, `max_recoveries` and `recovery_window_s` apply as in a real run.
    """

    rank_mtbf_s: Annotated[float | None, POSITIVE] = None
    """mean time between failures of a rank, exponentially distributed; null: no random faults"""
    at: tuple[float, ...] | None = None
    """seconds since the start at which a random rank of the first replica fails; null: by rank_mtbf_s"""
    hang_share: Annotated[float, SHARE] = 0.0
    """share of faults in which a rank hangs; in the others its process dies"""
    detect_process_s: Annotated[float, NOT_NEGATIVE] = 0.03
    """detection time of a dead process"""
    detect_hang_s: Annotated[float, NOT_NEGATIVE] = 12.0
    """detection time of a hung rank that has work"""
    stop_s: Annotated[float, NOT_NEGATIVE] = 0.02
    """time to end the processes of failed ranks"""
    start_s: Annotated[float, NOT_NEGATIVE] = 2.9
    """time for replacement ranks to start and join"""
    start_with_spare_s: Annotated[float, NOT_NEGATIVE] = 0.1
    """the same with a standby spare (parallel.spares); the next spare is ready start_s later"""
    rendezvous_s: Annotated[float, NOT_NEGATIVE] = 0.1
    """time for all ranks to reconnect"""
    weights_s: Annotated[float, NOT_NEGATIVE] = 0.2
    """time for the new ranks to load their weights"""

    def __post_init__(self) -> None:
        key, mtbf, at = "simulation.faults", self.rank_mtbf_s, self.at
        check_ranges(self, f"{key}.")
        check(f"{key}.at", at and list(at), at is None or min(at, default=0.0) >= 0, "null or seconds of 0 or more")
        check(f"{key}.at", at and list(at), at is None or mtbf is None, f"null if {key}.rank_mtbf_s is set")

    @property
    def are_any(self) -> bool:
        """Whether any rank may fail in the simulation."""
        return self.rank_mtbf_s is not None or bool(self.at)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationConfig:
    """Stage times, links, replicas, noise and faults of a simulation.

    With `record=false` micro-batches and requests are only counted: there is a summary, but no report.
    """

    cost: Literal["auto", "measured", "analytic"] = "auto"
    """source of stage times; auto: measured if profile is set, else analytic"""
    profile: str | None = None
    """profile folder written by `gapless profile`; null: the hardware's fitted constants"""
    devices: tuple[str, ...] | None = None
    """hardware of each stage in a heterogeneous cluster; null: hardware for all"""
    replicas: Annotated[int, Within(1, 10_000)] = 1
    """data-parallel pipelines"""
    router: Literal["round_robin", "least_requests", "least_tokens"] = "round_robin"
    """routing of requests to replicas: round robin, fewest requests, or fewest tokens"""
    scatter_gather: bool = True
    """each tensor-parallel rank sends a shard to the next stage, and the receivers all-gather"""
    overlap_sends: bool = True
    """overlap sends with compute"""
    host: bool = True
    """model the host overhead; false: as if the device always hid it"""
    launch: Literal["graphs", "eager"] = "graphs"
    """kernel launches: CUDA graphs, or one by one from the host"""
    last_layer: Literal["sampled", "all"] = "sampled"
    """rows that the model's last layer computes; sampled: only rows that sample a token, as in the real stage; all:
    every row, as in the paper's system"""
    dispatch_ms: Annotated[float, NOT_NEGATIVE] = 0.0
    """message latency from coordinator to ranks"""
    result_ms: Annotated[float, NOT_NEGATIVE] = 0.0
    """message latency from the last stage to the coordinator"""
    jitter: Annotated[float, NOT_NEGATIVE] = 0.0
    """coefficient of variation of stage times"""
    straggler_rate: Annotated[float, SHARE] = 0.0
    """share of stage times that are stragglers"""
    straggler_factor: Annotated[float, AT_LEAST_ONE] = 2.0
    """slowdown factor of stragglers"""
    draft_acceptance: Annotated[float, SHARE] = 0.5
    """probability that a draft token (scheduler.drafts) is accepted, given that the previous ones were"""
    expert_skew: Annotated[float, Within(0, 10)] = 0.0
    """expert load imbalance: Zipf exponent of the routing probabilities; 0: balanced"""
    faults: FaultsConfig = field(default_factory=FaultsConfig)
    disaggregation: DisaggregationConfig = field(default_factory=DisaggregationConfig)
    record: bool = True
    """keep the data of the report; false: only summary.json, for millions of requests in bounded memory"""

    def __post_init__(self) -> None:
        check_ranges(self, "simulation.")
        check("simulation.record", "false", self.record or self.replicas == 1, "true with several replicas")
        if self.disaggregation.is_on:
            pool = "simulation.disaggregation.prefill_replicas"
            check("simulation.record", "false", self.record, f"true if {pool} is set")
            right = f"null if {pool} is set; simulation.disaggregation.prefill_hardware sets that pool's"
            check("simulation.devices", self.devices and list(self.devices), self.devices is None, right)
            if self.faults.are_any:
                raise ConfigError(f"simulation.faults: not supported with {pool}; remove one of them")
        is_known = self.cost != "measured" or self.profile is not None
        check("simulation.cost", self.cost, is_known, "auto or analytic without simulation.profile")
