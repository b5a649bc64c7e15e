"""Config of each scheduling policy: `scheduler=NAME`, `scheduler.KEY=VALUE`. `runtime/scheduler/` implements them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from .errors import check
from .ranges import AT_LEAST_ONE, POSITIVE, Within, check_ranges


@dataclass(frozen=True, slots=True)
class Depth:
    """Pipeline depth, the number of micro-batches in flight. If `least` and `most` differ, the policy chooses."""

    least: int
    most: int

    def __post_init__(self) -> None:
        assert 1 <= self.least <= self.most, self

    @classmethod
    def fixed(cls, depth: int) -> Depth:
        """Return a fixed depth."""
        return cls(depth, depth)

    def within(self, most: int) -> Depth:
        """Return the depth, capped at `most`."""
        return Depth(min(self.least, most), min(self.most, most))


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Keys common to all policies."""

    name: str
    """the policy; choose it by scheduler=NAME"""
    batch: Annotated[int | Literal["slots"] | None, AT_LEAST_ONE] = None
    """B, maximum requests per micro-batch; null: max_batch, as far as KV blocks fit; slots: the paper's bound"""
    max_batch: Annotated[int, AT_LEAST_ONE] = 256
    """requests per micro-batch if batch is null; upper bound of B if batch is slots"""
    order: Literal["fcfs", "shortest_prompt", "fair_share", "deadline", "priority", "relative_slack"] = "fcfs"
    """order of admission: first come first served, shortest prompt, least-served user, earliest deadline, lowest
    priority value (which preempts running requests of a higher value), or longest wait relative to prompt length (short
    prompts may overtake a partly computed long one)"""
    drafts: Annotated[int, Within(0, 64)] = 0
    """prompt-lookup speculative decoding: maximum draft tokens per decode, verified if that saves time; 0: off"""

    def __post_init__(self) -> None:
        check_ranges(self, "scheduler.")

    def depth(self, pp: int, fixed: int | None = None) -> Depth:
        """Return the depth over `pp` stages. `fixed` is `parallel.depth`; None leaves it to the policy."""
        return Depth.fixed(fixed or pp)

    def batch_of(self, slots: int, depth: int) -> int:
        """Return B with `depth` micro-batches in flight.

        `slots`: the number of requests whose full context fits into memory at once.

        The slot bound is the paper's (4.3.1): every admitted request could grow to the maximum context length. Without
        it, requests are admitted while their KV blocks fit, as few ever reach the maximum.
        """
        if self.batch == "slots":
            return max(1, min(self.max_batch, slots // depth))
        return self.batch or self.max_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLevelConfig(SchedulerConfig):
    """FasterTransformer's policy: request-level batching; the next batch starts when all requests have finished."""

    name: Literal["request_level"] = "request_level"


@dataclass(frozen=True, slots=True, kw_only=True)
class OrcaWorstConfig(SchedulerConfig):
    """Orca's worst case: the requests of a micro-batch start and finish together."""

    name: Literal["orca_worst"] = "orca_worst"


@dataclass(frozen=True, slots=True, kw_only=True)
class OrcaBestConfig(SchedulerConfig):
    """Orca's best case: all ready decodes, and the full prompt of at most one new request."""

    name: Literal["orca_best"] = "orca_best"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillFirstConfig(SchedulerConfig):
    """vLLM's original policy: prefills before decodes. `max_prefill_tokens` is SGLang's key of that name."""

    name: Literal["prefill_first"] = "prefill_first"
    max_prefill_tokens: Annotated[int, AT_LEAST_ONE] = 2048
    """maximum prompt tokens per batch; a longer prompt is batched alone"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SarathiConfig(SchedulerConfig):
    """SARATHI, the paper's policy. `chunk=auto` chooses C as in section 4.4."""

    name: Literal["sarathi"] = "sarathi"
    chunk: Annotated[int | Literal["auto"], AT_LEAST_ONE] = 256
    """C, maximum prompt tokens per micro-batch; auto: chosen during the run"""
    tile: Annotated[int | None, AT_LEAST_ONE] = None
    """chunk + decodes is a multiple of it; null: hardware.tile"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBudgetConfig(SchedulerConfig):
    """Sarathi-Serve's policy; `max_batched_tokens` is its chunk size, and vLLM's `max_num_batched_tokens`."""

    name: Literal["token_budget"] = "token_budget"
    max_batched_tokens: Annotated[int, AT_LEAST_ONE] = 256
    """maximum tokens per micro-batch, including decodes"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenThrottleConfig(SchedulerConfig):
    """gLLM's token throttling: fewer prefill tokens per micro-batch as the share of free KV nears `kv_reserve`."""

    name: Literal["token_throttle"] = "token_throttle"
    iterations: Annotated[int, AT_LEAST_ONE] = 8
    """micro-batches over which waiting prompt tokens are spread"""
    max_prefill_tokens: int = 2048
    """maximum prompt tokens per micro-batch"""
    min_prefill_tokens: Annotated[int, AT_LEAST_ONE] = 32
    """minimum prompt tokens of a micro-batch with prefill"""
    kv_reserve: float = 0.05
    """share of free KV blocks at which prefill stops"""

    def __post_init__(self) -> None:
        SchedulerConfig.__post_init__(self)
        least, most = self.min_prefill_tokens, self.max_prefill_tokens
        check("scheduler.max_prefill_tokens", most, most >= least, f"{least} or more")
        check("scheduler.kv_reserve", self.kv_reserve, 0 <= self.kv_reserve < 1, "in [0, 1)")


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualTimeConfig(SchedulerConfig):
    """Micro-batches of equal predicted stage time."""

    name: Literal["equal_time"] = "equal_time"
    chunk: Annotated[int | Literal["auto"], AT_LEAST_ONE] = 256
    """prompt tokens of a typical micro-batch, whose time is the target of all; auto: chosen during the run"""
    target_ms: Annotated[float | None, POSITIVE] = None
    """target stage time of a micro-batch; null: that of a typical one of chunk tokens"""
    iterations: Annotated[int | None, AT_LEAST_ONE] = 24
    """chunks grow if more prompt tokens wait than this many micro-batches hold; lower values shorten TTFT and lengthen
    TBT; null: chunks never grow"""
    max_prefill_tokens: Annotated[int, AT_LEAST_ONE] = 2048
    """maximum tokens of a chunk that has grown"""
    tile: Annotated[int | None, AT_LEAST_ONE] = None
    """chunk + decodes is a multiple of it; null: hardware.tile"""

    def depth(self, pp: int, fixed: int | None = None) -> Depth:
        """Return a depth of up to pp + 1, so that the next micro-batch is ready when stage 0 finishes one."""
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
