"""Benchmark workloads, the requests and their arrival times: `workload=NAME`.

Keys are named as in `vllm bench serve` if it has them. All lengths are in tokens. Prompts are random token ids
(`sharegpt`: its texts), and outputs ignore end-of-sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from .errors import ConfigError, check
from .ranges import AT_LEAST_ONE, NOT_NEGATIVE, POSITIVE, Within, check_ranges

MAX_REQUESTS = 100_000_000  # lengths and arrivals must fit into memory


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadConfig:
    """Keys common to all workloads."""

    name: str
    """the workload; choose it by workload=NAME"""
    num_prompts: Annotated[int | None, Within(1, MAX_REQUESTS)] = None
    """number of requests; null: limited by duration_s, else all of the file, else 100 (capacity, tune: 400 of any)"""
    duration_s: Annotated[float | None, POSITIVE] = None
    """seconds after which no more requests are sent; pending ones are finished; null: until the last request"""
    warmup_requests: Annotated[int, Within(0, MAX_REQUESTS)] = 0
    """uncounted warm-up requests of the same kind, finished before the run"""
    distinct_prompts: Annotated[int | None, Within(1, MAX_REQUESTS)] = None
    """number of distinct prompts, which requests cycle through; null: one per request"""
    request_rate: Annotated[float | None, POSITIVE] = None
    """requests/s; inf: all at once; null: from the trace, or all at once"""
    burstiness: Annotated[float, POSITIVE] = 1.0
    """shape of the gamma-distributed inter-arrival times; 1: Poisson, lower: bursty, inf: constant intervals"""
    max_concurrency: Annotated[int | None, AT_LEAST_ONE] = None
    """closed loop: number of clients, each with one request at a time; null: open loop"""
    think_ms: Annotated[float, NOT_NEGATIVE] = 0.0
    """closed loop: think time between a response and the client's next request"""
    users: Annotated[int, AT_LEAST_ONE] = 1
    """number of users, assigned to requests round robin, for scheduler.order=fair_share"""
    deadline_ms: Annotated[float | None, POSITIVE] = None
    """deadline of the first token after arrival, for scheduler.order=deadline; null: none"""
    priorities: tuple[int, ...] = (0,)
    """priorities, assigned to requests round robin, for scheduler.order=priority; lower is more urgent"""
    seed: Annotated[int, Within(0, (1 << 32) - 1)] = 0
    """seed of lengths, arrivals and random prompts"""

    def __post_init__(self) -> None:
        check_ranges(self, "workload.")
        is_loop = self.max_concurrency is not None
        check("workload.think_ms", self.think_ms, is_loop or not self.think_ms, "0 without max_concurrency")
        check("workload.priorities", "[]", bool(self.priorities), "at least one priority")


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedConfig(WorkloadConfig):
    """Requests of fixed length: P = `input_len`, D = `output_len`; give two of these and `pd_ratio`.

    With `range_ratio` r, lengths are uniform between (1 - r) and (1 + r) times that.
    """

    name: Literal["fixed"] = "fixed"
    input_len: Annotated[int | None, AT_LEAST_ONE] = 1024
    """prompt tokens; null: from pd_ratio"""
    output_len: Annotated[int | None, AT_LEAST_ONE] = 128
    """output tokens; null: from pd_ratio"""
    pd_ratio: Annotated[float | None, POSITIVE] = None
    """ratio of prompt to output tokens, for the length that is null"""
    range_ratio: float = 0.0
    """lengths vary uniformly by this share in either direction"""

    def __post_init__(self) -> None:
        WorkloadConfig.__post_init__(self)
        check("workload.range_ratio", self.range_ratio, 0 <= self.range_ratio < 1, "in [0, 1)")
        if [self.input_len, self.output_len, self.pd_ratio].count(None) != 1:
            raise ConfigError("workload=fixed: give two of input_len, output_len and pd_ratio, and null for the third")


@dataclass(frozen=True, slots=True, kw_only=True)
class ZipfConfig(WorkloadConfig):
    """P + D is Zipf-distributed over `min_len` .. `max_len` and split by `pd_ratio`.

    Section 5.3 of the paper has `theta` 0.4, and 1K to 4K.
    """

    name: Literal["zipf"] = "zipf"
    theta: Annotated[float, NOT_NEGATIVE] = 0.4
    """exponent of the Zipf law of P + D"""
    min_len: Annotated[int, Within(2)] = 1024
    """minimum P + D, in tokens"""
    max_len: int = 4096
    """maximum P + D, in tokens"""
    pd_ratio: Annotated[float, POSITIVE] = 10.0
    """ratio of prompt to output tokens"""

    def __post_init__(self) -> None:
        WorkloadConfig.__post_init__(self)
        check("workload.max_len", self.max_len, self.max_len >= self.min_len, f"min_len={self.min_len} or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceConfig(WorkloadConfig):
    """Requests of a recorded trace, truncated to the context length.

    Azure's CSV has the columns TIMESTAMP, ContextTokens and GeneratedTokens.
    """

    name: Literal["trace"] = "trace"
    path: str = ""
    """CSV or JSON trace (Azure, BurstGPT, Mooncake, Bailian), gzipped or not"""
    time_scale: Annotated[float, POSITIVE] = 1.0
    """speedup factor of the trace"""
    hash_block_size: Annotated[int | None, AT_LEAST_ONE] = None
    """prompt tokens per entry of a JSONL's hash_ids; null: 16 with a chat_id (Bailian), else 512"""

    def __post_init__(self) -> None:
        WorkloadConfig.__post_init__(self)
        check("workload.path", self.path, bool(self.path), "the trace file")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareGptConfig(WorkloadConfig):
    """Conversations of a ShareGPT JSON: the first turn is the prompt, the second one's length the output length."""

    name: Literal["sharegpt"] = "sharegpt"
    path: str = ""
    """JSON file of conversations"""
    output_len: Annotated[int | None, AT_LEAST_ONE] = None
    """output tokens per request; null: the length of the second turn"""

    def __post_init__(self) -> None:
        WorkloadConfig.__post_init__(self)
        check("workload.path", self.path, bool(self.path), "a JSON file of conversations")


WORKLOAD_CONFIGS: dict[str, type[WorkloadConfig]] = {
    "fixed": FixedConfig,
    "zipf": ZipfConfig,
    "trace": TraceConfig,
    "sharegpt": ShareGptConfig,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SloConfig:
    """Latency SLO of a request; requests that meet all bounds count for goodput. null: no bound."""

    ttft_ms: Annotated[float | None, POSITIVE] = None
    """bound on TTFT; requests that meet all bounds count for goodput"""
    tpot_ms: Annotated[float | None, POSITIVE] = None
    """bound on TPOT, the mean time per output token after the first"""
    tbt_ms: Annotated[float | None, POSITIVE] = None
    """bound on the maximum TBT of a request"""
    e2el_ms: Annotated[float | None, POSITIVE] = None
    """bound on end-to-end latency"""

    def __post_init__(self) -> None:
        check_ranges(self, "slo.")
