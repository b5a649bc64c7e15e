"""Which requests a benchmark sends, and when: `workload=NAME`.

Key names are those of `vllm bench serve` where it has one. All lengths are tokens. Prompts are random token ids
(`sharegpt`: its texts), outputs run to their length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .errors import ConfigError, check


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadConfig:
    """What every workload knows.

    `num_prompts` null: all of the file (100 where there is none). `request_rate` in requests/s with gamma gaps
    (`burstiness` 1: Poisson), `inf`: all at once, null: from the trace, or all at once. `max_concurrency` holds
    requests back while so many are unfinished. `users` deals requests round robin to so many users (fair_share);
    `deadline_ms` after arrival is when the first token is due (deadline).
    """

    name: str
    """the workload; choose it by workload=NAME"""
    num_prompts: int | None = None
    """requests; null: all of the file, 100 where there is none (capacity, tune: 400 of any)"""
    request_rate: float | None = None
    """requests/s; inf: all at once; null: from the trace, or all at once"""
    burstiness: float = 1.0
    """shape of the gamma-distributed gaps: 1 is Poisson, less comes in bursts, inf ticks"""
    max_concurrency: int | None = None
    """hold requests back while so many are unfinished; null: never"""
    users: int = 1
    """deal requests round robin to so many users, for scheduler.order=fair_share"""
    deadline_ms: float | None = None
    """when the first token is due after the arrival, for scheduler.order=deadline; null: never"""
    seed: int = 0
    """of lengths, arrivals and random prompts"""

    def __post_init__(self) -> None:
        check("workload.num_prompts", self.num_prompts, self.num_prompts is None or self.num_prompts >= 1,
              "null or 1 or more")
        check("workload.request_rate", self.request_rate, self.request_rate is None or self.request_rate > 0,
              "null, inf or above 0")
        check("workload.burstiness", self.burstiness, self.burstiness > 0, "above 0")
        check("workload.max_concurrency", self.max_concurrency,
              self.max_concurrency is None or self.max_concurrency >= 1, "null or 1 or more")
        check("workload.users", self.users, self.users >= 1, "1 or more")
        check("workload.deadline_ms", self.deadline_ms, self.deadline_ms is None or self.deadline_ms > 0,
              "null or above 0")
        check("workload.seed", self.seed, 0 <= self.seed < 1 << 32, "0 to 4294967295")


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedConfig(WorkloadConfig):
    """Every request alike: P = `input_len`, D = `output_len`; with `pd_ratio` P:D gives the one that is null.

    With `range_ratio` r each length is uniform in [(1-r), (1+r)] of that.
    """

    name: Literal["fixed"] = "fixed"
    input_len: int | None = 1024
    """prompt tokens; null: by pd_ratio"""
    output_len: int | None = 128
    """output tokens, null: by pd_ratio"""
    pd_ratio: float | None = None
    """prompt tokens over output tokens, for the length that is null"""
    range_ratio: float = 0.0
    """lengths vary evenly by this share either way"""

    def __post_init__(self) -> None:
        WorkloadConfig.__post_init__(self)
        for key in ("input_len", "output_len"):
            value = getattr(self, key)
            check(f"workload.{key}", value, value is None or value >= 1, "null or 1 or more")
        check("workload.pd_ratio", self.pd_ratio, self.pd_ratio is None or self.pd_ratio > 0, "null or above 0")
        check("workload.range_ratio", self.range_ratio, 0 <= self.range_ratio < 1, "in [0, 1)")
        if [self.input_len, self.output_len, self.pd_ratio].count(None) != 1:
            raise ConfigError("workload=fixed: give two of input_len, output_len and pd_ratio, and null for the third")


@dataclass(frozen=True, slots=True, kw_only=True)
class ZipfConfig(WorkloadConfig):
    """P + D from a Zipf law with exponent `theta` over `min_len` .. `max_len` (paper 5.3: 0.4, 1K to 4K), cut at
    `pd_ratio`."""

    name: Literal["zipf"] = "zipf"
    theta: float = 0.4
    """exponent of the law of P + D"""
    min_len: int = 1024
    """least P + D"""
    max_len: int = 4096
    """most P + D"""
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
    """Recorded requests, `time_scale` times as fast: a CSV (Azure: TIMESTAMP, ContextTokens, GeneratedTokens; BurstGPT)
    or a JSONL (Mooncake, Bailian), .gz too. Those longer than the context are cut to it.
    """

    name: Literal["trace"] = "trace"
    path: str = ""
    """a CSV (Azure, BurstGPT) or JSONL (Mooncake, Bailian), .gz or not"""
    time_scale: float = 1.0
    """so many times as fast"""

    def __post_init__(self) -> None:
        WorkloadConfig.__post_init__(self)
        check("workload.path", self.path, bool(self.path), "the file of the trace")
        check("workload.time_scale", self.time_scale, self.time_scale > 0, "above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareGptConfig(WorkloadConfig):
    """A ShareGPT JSON: of each conversation the first turn is the prompt, the second says how long the output is.

    `output_len` sets that length for all.
    """

    name: Literal["sharegpt"] = "sharegpt"
    path: str = ""
    """a JSON"""
    output_len: int | None = None
    """of all, null: as the second turn"""

    def __post_init__(self) -> None:
        WorkloadConfig.__post_init__(self)
        check("workload.path", self.path, bool(self.path), "the JSON file of the conversations")
        check("workload.output_len", self.output_len, self.output_len is None or self.output_len >= 1,
              "null or 1 or more")


WORKLOAD_CONFIGS: dict[str, type[WorkloadConfig]] = {
    "fixed": FixedConfig,
    "zipf": ZipfConfig,
    "trace": TraceConfig,
    "sharegpt": ShareGptConfig,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SloConfig:
    """What a request must meet to count as good: most milliseconds of each; null: no bound."""

    ttft_ms: float | None = None
    """most milliseconds to the first token; requests that meet all bounds count for goodput"""
    tpot_ms: float | None = None
    """most milliseconds a token after the first, on average"""
    tbt_ms: float | None = None
    """most milliseconds between two tokens, at the worst"""
    e2el_ms: float | None = None
    """most milliseconds from arrival to the last token"""

    def __post_init__(self) -> None:
        for key in ("ttft_ms", "tpot_ms", "tbt_ms", "e2el_ms"):
            value = getattr(self, key)
            check(f"slo.{key}", value, value is None or value > 0, "null or above 0")
