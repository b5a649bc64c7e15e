"""The keys that only a simulation has: stage times, replicas, disturbances, faults: `simulation.KEY=VALUE`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from .disaggregation import DisaggregationConfig
from .errors import ConfigError, check, check_each


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultsConfig:
    """When ranks of a simulated pipeline fail, and how long a repair takes.

    The default seconds were measured with a small model on two CPU cores under Ray (docs/simulate.md); give those of
    your own cluster. `parallel.spares`, `max_recoveries` and `recovery_window_s` hold as in a real run.
    """

    rank_mtbf_s: float | None = None
    """mean seconds between faults of one rank, drawn by seed from an exponential law; null: no random faults"""
    at: tuple[float, ...] | None = None
    """seconds since the start at which a rank, drawn by seed, of the first replica fails; null: by rank_mtbf_s"""
    hang_share: float = 0.0
    """share of faults in which a rank hangs; in the others its process ends"""
    detect_process_s: float = 0.03
    """time from the end of a rank's process until it is noticed"""
    detect_hang_s: float = 12.0
    """time from when a rank that has work hangs until it is noticed"""
    stop_s: float = 0.02
    """then, time until the processes of the failed ranks have ended"""
    start_s: float = 2.9
    """then, time until new ranks have started and joined in their place"""
    start_with_spare_s: float = 0.1
    """the same where a spare stands by (parallel.spares); the next spare is ready start_s later"""
    rendezvous_s: float = 0.1
    """then, time until all ranks have connected with each other"""
    weights_s: float = 0.2
    """then, time until the new ranks have loaded their weights"""

    def __post_init__(self) -> None:
        key, mtbf, at = "simulation.faults", self.rank_mtbf_s, self.at
        check_each(f"{key}.", self, lambda s: s > 0, "above 0", "rank_mtbf_s")
        check(f"{key}.at", at and list(at), at is None or min(at, default=0.0) >= 0, "null or seconds of 0 or more")
        check(f"{key}.at", at and list(at), at is None or mtbf is None, f"null where {key}.rank_mtbf_s draws them")
        check(f"{key}.hang_share", self.hang_share, 0 <= self.hang_share <= 1, "in [0, 1]")
        parts = ("stop_s", "start_s", "start_with_spare_s", "rendezvous_s", "weights_s")
        check_each(f"{key}.", self, lambda s: s >= 0, "0 or more", "detect_process_s", "detect_hang_s", *parts)

    @property
    def are_any(self) -> bool:
        """Whether any rank may fail in the simulation."""
        return self.rank_mtbf_s is not None or bool(self.at)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationConfig:
    """The source of the stage times, the links between stages, the replicas, the disturbances and the faults.

    With `record=false` micro-batches and requests are counted and forgotten: there is a summary, but no report.
    """

    cost: Literal["auto", "measured", "analytic"] = "auto"
    """where stage times come from; auto: measured where profile is given, else analytic"""
    profile: str | None = None
    """a folder that `gapless profile` wrote; null: the hardware's fitted constants"""
    devices: tuple[str, ...] | None = None
    """hardware of each stage, where nodes differ; null: hardware everywhere"""
    replicas: int = 1
    """pipelines that serve side by side"""
    router: Literal["round_robin", "least_requests", "least_tokens"] = "round_robin"
    """which replica a request goes to: by turns, or the one with the fewest requests or tokens"""
    scatter_gather: bool = True
    """each tensor-parallel rank sends a slice to the next stage, and the receivers gather"""
    overlap_sends: bool = True
    """a stage goes on computing while it sends"""
    host: bool = True
    """count the host's overhead; false: as if the device always hid it"""
    launch: Literal["graphs", "eager"] = "graphs"
    """whether the engine launches a layer's kernels as CUDA graphs, or each from its host"""
    last_layer: Literal["sampled", "all"] = "sampled"
    """rows for which the model's last layer computes attention and feed-forward; sampled: those that sample a token, as
    in the real stage; all: every row, as in the paper's system"""
    dispatch_ms: float = 0.0
    """time of a micro-batch's message from the coordinator to the ranks"""
    result_ms: float = 0.0
    """time of a result from the last stage to the coordinator"""
    jitter: float = 0.0
    """coefficient of variation of stage times around the cost model's"""
    straggler_rate: float = 0.0
    """share of stage times that take straggler_factor times as long"""
    straggler_factor: float = 2.0
    """how many times as long those take"""
    draft_acceptance: float = 0.5
    """probability that a draft token (scheduler.drafts) is accepted, given that those before it were"""
    expert_skew: float = 0.0
    """how unevenly tokens are routed to experts: the exponent of Zipf's law of the experts' weights; 0: evenly"""
    faults: FaultsConfig = field(default_factory=FaultsConfig)
    disaggregation: DisaggregationConfig = field(default_factory=DisaggregationConfig)
    record: bool = True
    """keep all that the report shows; false: only summary.json, millions of requests in bounded memory"""

    def __post_init__(self) -> None:
        check("simulation.replicas", self.replicas, 1 <= self.replicas <= 10_000, "1 to 10000")
        check("simulation.record", "false", self.record or self.replicas == 1, "true where there are several replicas")
        if self.disaggregation.is_on:
            pool = "simulation.disaggregation.prefill_replicas"
            check("simulation.record", "false", self.record, f"true where there is {pool}")
            right = f"null where there is {pool}; simulation.disaggregation.prefill_hardware is that pool's"
            check("simulation.devices", self.devices and list(self.devices), self.devices is None, right)
            if self.faults.are_any:
                raise ConfigError(f"simulation.faults: must be empty where there is {pool}; leave one of the two out")
        check_each("simulation.", self, lambda v: v >= 0, "0 or more", "dispatch_ms", "result_ms", "jitter")
        check_each("simulation.", self, lambda p: 0 <= p <= 1, "in [0, 1]", "straggler_rate", "draft_acceptance")
        check("simulation.expert_skew", self.expert_skew, 0 <= self.expert_skew <= 10, "in [0, 10]")
        check("simulation.straggler_factor", self.straggler_factor, self.straggler_factor >= 1, "1 or more")
        is_known = self.cost != "measured" or self.profile is not None
        check("simulation.cost", self.cost, is_known, "auto or analytic where simulation.profile names no folder")
