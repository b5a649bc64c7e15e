"""Which requests a benchmark sends, and when: `workload=NAME`.

Key names are those of `vllm bench serve` where it has one. All lengths are tokens. Prompts are random token ids
(`sharegpt`: its texts), outputs run to their length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .errors import ConfigError, check, check_each

MAX_REQUESTS = 100_000_000  # whose lengths and arrivals fit into memory


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadConfig:
    """The keys that every workload has."""

    name: str
    """the workload; choose it by workload=NAME"""
    num_prompts: int | None = None
    """requests; null: as many as duration_s allows, else all of the file, else 100 (capacity, tune: 400 of any)"""
    duration_s: float | None = None
    """seconds after which no more requests are sent; those that were are answered; null: the last one ends the run"""
    warmup_requests: int = 0
    """requests before these, of the same kind, that are answered first and not counted"""
    distinct_prompts: int | None = None
    """prompts, with their lengths, that requests repeat in turn; null: each request has its own"""
    request_rate: float | None = None
    """requests/s; inf: all at once; null: from the trace, or all at once"""
    burstiness: float = 1.0
    """shape of the gamma-distributed gaps: 1 is Poisson, less comes in bursts, inf ticks"""
    max_concurrency: int | None = None
    """clients of a closed loop, each of which sends its next request once it has its answer; null: no bound"""
    think_ms: float = 0.0
    """time that a client of a closed loop waits between an answer and its next request"""
    users: int = 1
    """number of users that requests are dealt to in turn, for scheduler.order=fair_share"""
    deadline_ms: float | None = None
    """when the first token is due after the arrival, for scheduler.order=deadline; null: never"""
    priorities: tuple[int, ...] = (0,)
    """priorities that requests are dealt in turn, for scheduler.order=priority; lower is more urgent"""
    seed: int = 0
    """seed of lengths, arrivals and random prompts"""

    def __post_init__(self) -> None:
        most, rate = f"1 to {MAX_REQUESTS}", self.request_rate
        check_each("workload.", self, lambda n: 1 <= n <= MAX_REQUESTS, most, "num_prompts", "distinct_prompts")
        check("workload.request_rate", rate, rate is None or rate > 0, "null, inf or above 0")
        check_each("workload.", self, lambda v: v > 0, "above 0", "burstiness", "duration_s", "deadline_ms")
        check_each("workload.", self, lambda n: n >= 1, "1 or more", "max_concurrency", "users")
        check("workload.think_ms", self.think_ms, self.think_ms >= 0, "0 or more")
        is_loop = self.max_concurrency is not None
        check("workload.think_ms", self.think_ms, is_loop or not self.think_ms, "0 where max_concurrency is null")
        is_count = 0 <= self.warmup_requests <= MAX_REQUESTS
        check("workload.warmup_requests", self.warmup_requests, is_count, f"0 to {MAX_REQUESTS}")
        check("workload.priorities", "[]", bool(self.priorities), "one priority or more")
        check("workload.seed", self.seed, 0 <= self.seed < 1 << 32, "0 to 4294967295")


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedConfig(WorkloadConfig):
    """Requests that are all alike: P = `input_len`, D = `output_len`; two of these and `pd_ratio` are given.

    With `range_ratio` r each length is drawn uniformly from (1 - r) to (1 + r) times that.
    """

    name: Literal["fixed"] = "fixed"
    input_len: int | None = 1024
    """prompt tokens; null: by pd_ratio"""
    output_len: int | None = 128
    """output tokens; null: by pd_ratio"""
    pd_ratio: float | None = None
    """prompt tokens over output tokens, for the length that is null"""
    range_ratio: float = 0.0
    """lengths vary evenly by this share either way"""

    def __post_init__(self) -> None:
        WorkloadConfig.__post_init__(self)
        for key in ("input_len", "output_len"):
            value = getattr(self, key)
            check(f"workload.{key}", value, value is None or value >= 1, "null or 1 or more")
        check_each("workload.", self, lambda ratio: ratio > 0, "above 0", "pd_ratio")
        check("workload.range_ratio", self.range_ratio, 0 <= self.range_ratio < 1, "in [0, 1)")
        if [self.input_len, self.output_len, self.pd_ratio].count(None) != 1:
            raise ConfigError("workload=fixed: give two of input_len, output_len and pd_ratio, and null for the third")


@dataclass(frozen=True, slots=True, kw_only=True)
class ZipfConfig(WorkloadConfig):
    """P + D drawn from a Zipf law over `min_len` .. `max_len`, split by `pd_ratio`.

    The paper's 5.3 has `theta` 0.4, and 1K to 4K.
    """

    name: Literal["zipf"] = "zipf"
    theta: float = 0.4
    """exponent of the law of P + D"""
    min_len: int = 1024
    """least P + D, in tokens"""
    max_len: int = 4096
    """most P + D, in tokens"""
    pd_ratio: float = 10.0
    """prompt tokens over output tokens"""

    def __post_init__(self) -> None:
        WorkloadConfig.__post_init__(self)
        check("workload.theta", self.theta, self.theta >= 0, "0 or more")
        check("workload.min_len", self.min_len, self.min_len >= 2, "2 or more")
        check("workload.max_len", self.max_len, self.max_len >= self.min_len, f"min_len={self.min_len} or more")
        check("workload.pd_ratio", self.pd_ratio, self.pd_ratio > 0, "above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceConfig(WorkloadConfig):
    """Requests of a recorded trace. Those longer than the context are cut to it.

    Azure's CSV has the columns TIMESTAMP, ContextTokens and GeneratedTokens.
    """

    name: Literal["trace"] = "trace"
    path: str = ""
    """a CSV or JSON (Azure, BurstGPT, Mooncake, Bailian), gzipped or not"""
    time_scale: float = 1.0
    """factor by which the trace is sped up"""
    hash_block_size: int | None = None
    """prompt tokens that one of a JSONL's hash_ids stands for; null: 16 where it has a chat_id (Bailian), else 512"""

    def __post_init__(self) -> None:
        WorkloadConfig.__post_init__(self)
        check("workload.path", self.path, bool(self.path), "the file of the trace")
        check("workload.time_scale", self.time_scale, self.time_scale > 0, "above 0")
        check_each("workload.", self, lambda size: size >= 1, "1 or more", "hash_block_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareGptConfig(WorkloadConfig):
    """Conversations of a ShareGPT JSON.

    The first turn of each is the prompt, the length of the second that of the output.
    """

    name: Literal["sharegpt"] = "sharegpt"
    path: str = ""
    """a JSON of conversations"""
    output_len: int | None = None
    """output tokens of every request; null: as many as the second turn has"""

    def __post_init__(self) -> None:
        WorkloadConfig.__post_init__(self)
        check("workload.path", self.path, bool(self.path), "the JSON file of the conversations")
        check_each("workload.", self, lambda length: length >= 1, "1 or more", "output_len")


WORKLOAD_CONFIGS: dict[str, type[WorkloadConfig]] = {
    "fixed": FixedConfig,
    "zipf": ZipfConfig,
    "trace": TraceConfig,
    "sharegpt": ShareGptConfig,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SloConfig:
    """Bounds that a request must meet to count for goodput, in milliseconds; null: no bound."""

    ttft_ms: float | None = None
    """most milliseconds to the first token; requests that meet all bounds count for goodput"""
    tpot_ms: float | None = None
    """most milliseconds a token after the first, on average"""
    tbt_ms: float | None = None
    """most milliseconds between two tokens, at the worst"""
    e2el_ms: float | None = None
    """most milliseconds from arrival to the last token"""

    def __post_init__(self) -> None:
        check_each("slo.", self, lambda ms: ms > 0, "above 0", "ttft_ms", "tpot_ms", "tbt_ms", "e2el_ms")
