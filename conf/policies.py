"""The keys of each policy: `scheduler=NAME` and `scheduler.KEY=VALUE`. The rules are in `runtime/scheduler/`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .errors import check, check_each

_MOST_DRAFTS = 64  # a guess that long is hardly ever right to its end


@dataclass(frozen=True, slots=True)
class Depth:
    """Micro-batches in flight at once: at least `least` and at most `most`; where they differ the policy chooses."""

    least: int
    most: int

    def __post_init__(self) -> None:
        assert 1 <= self.least <= self.most, self

    @classmethod
    def fixed(cls, depth: int) -> Depth:
        """Return a depth that leaves the policy no choice."""
        return cls(depth, depth)

    def within(self, most: int) -> Depth:
        """Return the depth on a pipeline that takes `most` micro-batches at once."""
        return Depth(min(self.least, most), min(self.most, most))


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """The keys that every policy has."""

    name: str
    """the policy; choose it by scheduler=NAME"""
    batch: int | Literal["slots"] | None = None
    """B, most requests in a micro-batch; null: max_batch, as far as KV blocks fit; slots: the paper's bound"""
    max_batch: int = 256
    """requests in a micro-batch where batch is null, and most of them where batch is slots"""
    order: Literal["fcfs", "shortest_prompt", "fair_share", "deadline", "priority", "relative_slack"] = "fcfs"
    """which waiting request is next: first come, shortest prompt, the user served least, the nearest deadline, the
    lowest priority, for which running ones of a higher one are preempted, or the longest wait relative to the prompt's
    length, where short prompts go before a long one that is partly computed"""
    max_prefill_share: float = 1.0
    """largest share of the prompt tokens dispatched that one request may take while others wait; 1: no bound"""
    drafts: int = 0
    """most tokens of a decode guessed from its prompt and output, verified in the same pass where that pays; 0: none"""

    def __post_init__(self) -> None:
        is_batch = self.batch is None or self.batch == "slots" or self.batch >= 1
        check("scheduler.batch", self.batch, is_batch, "null, slots, or 1 or more")
        check_each("scheduler.", self, lambda n: n >= 1, "1 or more", "max_batch")
        share = self.max_prefill_share
        check("scheduler.max_prefill_share", share, 0 < share <= 1, "above 0, 1 at most")
        check("scheduler.drafts", self.drafts, 0 <= self.drafts <= _MOST_DRAFTS, f"0 to {_MOST_DRAFTS}")

    @property
    def rule(self) -> str:
        """The file among the policies that holds the rule."""
        return self.name

    def depth(self, pp: int, fixed: int | None = None) -> Depth:
        """Return the depth over `pp` stages, where `parallel.depth` is `fixed`; None leaves it to the policy."""
        return Depth.fixed(fixed or pp)

    def batch_of(self, slots: int, depth: int) -> int:
        """Return B with `depth` micro-batches in flight.

        `slots`: requests whose whole context fits into the memory at once.

        The slot bound is the paper's (4.3.1): each request that is admitted could grow to the longest context. Without
        it requests are admitted as the blocks of their tokens fit, and few ever need a whole context.
        """
        if self.batch == "slots":
            return max(1, min(self.max_batch, slots // depth))
        return self.batch or self.max_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLevelConfig(SchedulerConfig):
    """FasterTransformer's policy: a batch of requests enters together, and the next one when all of them are done."""

    name: Literal["request_level"] = "request_level"


@dataclass(frozen=True, slots=True, kw_only=True)
class OrcaWorstConfig(SchedulerConfig):
    """Orca's policy at its worst: the requests of a micro-batch start and end together."""

    name: Literal["orca_worst"] = "orca_worst"


@dataclass(frozen=True, slots=True, kw_only=True)
class OrcaBestConfig(SchedulerConfig):
    """Orca's policy at its best: every ready decode, and the whole prompt of at most one new request."""

    name: Literal["orca_best"] = "orca_best"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillFirstConfig(SchedulerConfig):
    """`max_batched_tokens` is vLLM's `max_num_batched_tokens`."""

    name: Literal["prefill_first"] = "prefill_first"
    max_batched_tokens: int = 2048
    """most prompt tokens of a batch; a longer prompt enters alone"""

    def __post_init__(self) -> None:
        SchedulerConfig.__post_init__(self)
        check("scheduler.max_batched_tokens", self.max_batched_tokens, self.max_batched_tokens >= 1, "1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class SarathiConfig(SchedulerConfig):
    """The paper's policy: C is chosen as in 4.4 where `chunk` is `auto`."""

    name: Literal["sarathi"] = "sarathi"
    chunk: int | Literal["auto"] = 256
    """C, most prompt tokens of a micro-batch; auto: picked as the run goes"""
    tile: int | None = None
    """chunk + decodes is a multiple of it; null: hardware.tile"""
    balance_decodes: bool = False
    """deal decodes over the micro-batches in flight by learned stage times; false: take every ready one (the paper)"""

    def __post_init__(self) -> None:
        SchedulerConfig.__post_init__(self)
        check("scheduler.chunk", self.chunk, self.chunk == "auto" or self.chunk >= 1, "auto or 1 or more")
        check_each("scheduler.", self, lambda n: n >= 1, "1 or more", "tile")

    @property
    def rule(self) -> str:
        """That of the paper, unless decodes are balanced."""
        return "balanced_sarathi" if self.balance_decodes else self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBudgetConfig(SchedulerConfig):
    """`budget` is Sarathi-Serve's chunk size."""

    name: Literal["token_budget"] = "token_budget"
    budget: int = 256
    """most tokens of a micro-batch, decodes included"""

    def __post_init__(self) -> None:
        SchedulerConfig.__post_init__(self)
        check("scheduler.budget", self.budget, self.budget >= 1, "1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenThrottleConfig(SchedulerConfig):
    """gLLM's limits. A micro-batch prefills fewer tokens as the share of free KV falls to `kv_reserve`."""

    name: Literal["token_throttle"] = "token_throttle"
    iterations: int = 8
    """waiting prompt tokens are spread over this many micro-batches"""
    max_prefill_tokens: int = 2048
    """most prompt tokens of a micro-batch"""
    min_prefill_tokens: int = 32
    """fewest prompt tokens of a micro-batch that prefills"""
    kv_reserve: float = 0.05
    """share of free KV at which prefill stops"""

    def __post_init__(self) -> None:
        SchedulerConfig.__post_init__(self)
        least = self.min_prefill_tokens
        check_each("scheduler.", self, lambda n: n >= 1, "1 or more", "iterations", "min_prefill_tokens")
        check_each("scheduler.", self, lambda n: n >= least, f"{least} or more", "max_prefill_tokens")
        check("scheduler.kv_reserve", self.kv_reserve, 0 <= self.kv_reserve < 1, "in [0, 1)")


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualTimeConfig(SchedulerConfig):
    """Micro-batches of equal predicted stage time."""

    name: Literal["equal_time"] = "equal_time"
    chunk: int | Literal["auto"] = 256
    """prompt tokens of a typical micro-batch, whose time every micro-batch keeps to; auto: picked as the run goes"""
    target_ms: float | None = None
    """time of a micro-batch on a stage; null: that of a typical one of chunk tokens"""
    iterations: int | None = 24
    """chunks grow where more prompt tokens wait than this many micro-batches take: fewer make TTFT shorter and TBT
    longer; null: chunks never grow"""
    max_prefill_tokens: int = 2048
    """most tokens of a chunk that has grown"""
    tile: int | None = None
    """chunk + decodes is a multiple of it; null: hardware.tile"""
    profile: str | None = None
    """a run folder whose fitted stage times it starts from; null: learned as it runs"""

    def __post_init__(self) -> None:
        SchedulerConfig.__post_init__(self)
        check("scheduler.chunk", self.chunk, self.chunk == "auto" or self.chunk >= 1, "auto or 1 or more")
        check_each("scheduler.", self, lambda ms: ms > 0, "above 0", "target_ms")
        growth = self.iterations
        check("scheduler.iterations", growth, growth is None or growth >= 1, "null or 1 or more")
        check_each("scheduler.", self, lambda n: n >= 1, "1 or more", "max_prefill_tokens", "tile")

    def depth(self, pp: int, fixed: int | None = None) -> Depth:
        """Return a depth of up to one more than the stages.

        The next micro-batch then lies ready when stage 0 ends one.
        """
        return Depth.fixed(fixed or pp) if fixed or pp == 1 else Depth(pp, pp + 1)


POLICY_CONFIGS: dict[str, type[SchedulerConfig]] = {
    "request_level": RequestLevelConfig,
    "orca_worst": OrcaWorstConfig,
    "orca_best": OrcaBestConfig,
    "prefill_first": PrefillFirstConfig,
    "sarathi": SarathiConfig,
    "token_budget": TokenBudgetConfig,
    "token_throttle": TokenThrottleConfig,
    "equal_time": EqualTimeConfig,
}
