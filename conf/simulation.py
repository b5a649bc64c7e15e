"""A simulated cluster, beside its model, hardware and rank grid: `simulation.KEY=VALUE`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .errors import check


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationConfig:
    """The source of the stage times, the links between stages, the replicas, and the disturbances.

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
    """which replica a request goes to: by turns, or to that with the fewest requests or tokens"""
    scatter_gather: bool = True
    """each tensor-parallel rank sends a slice to the next stage, and the receivers gather"""
    overlap_sends: bool = True
    """a stage computes on while it sends"""
    host: bool = True
    """count the host's overhead; false: as if the device always hid it"""
    last_layer: Literal["sampled", "all"] = "sampled"
    """the rows whose attention and feed-forward the model's last layer computes: those that sample a token, as the real
    stage does, or all, as the paper's system does"""
    dispatch_ms: float = 0.0
    """time of a micro-batch's message from the coordinator to the ranks"""
    result_ms: float = 0.0
    """time of a result from the last stage to the coordinator"""
    jitter: float = 0.0
    """coefficient of variation of stage times around the cost model's"""
    straggler_rate: float = 0.0
    """share of stage times that take straggler_factor times as long"""
    straggler_factor: float = 2.0
    """how much longer those take"""
    draft_acceptance: float = 0.5
    """probability that a draft token (scheduler.drafts) is accepted, given that those before it were"""
    record: bool = True
    """keep all that the report shows; false: only summary.json, millions of requests in bounded memory"""

    def __post_init__(self) -> None:
        check("simulation.replicas", self.replicas, 1 <= self.replicas <= 10_000, "1 to 10000")
        check("simulation.record", "false", self.record or self.replicas == 1, "true where there are several replicas")
        for key in ("dispatch_ms", "result_ms", "jitter"):
            check(f"simulation.{key}", getattr(self, key), getattr(self, key) >= 0, "0 or more")
        check("simulation.straggler_rate", self.straggler_rate, 0 <= self.straggler_rate <= 1, "in [0, 1]")
        check("simulation.draft_acceptance", self.draft_acceptance, 0 <= self.draft_acceptance <= 1, "in [0, 1]")
        check("simulation.straggler_factor", self.straggler_factor, self.straggler_factor >= 1, "1 or more")
        check("simulation.cost", self.cost, self.cost != "measured" or self.profile is not None,
              "auto or analytic where simulation.profile names no folder")
