"""Constants of the analytic cost model, per device type; `conf/hardware/*.yaml` cites their sources."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from .errors import check

_KEY = "hardware.costs"


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmConfig:
    """The cost of tiled GEMMs (`runtime/simulation/cost/gemm.py`).

    `tiles`, `tflops` and `whole_waves` have one value per tile shape. A library chooses among these shapes and their
    transposes.
    """

    tiles: tuple[str, ...]
    """GEMM tile shapes"""
    tflops: tuple[float, ...]
    """throughput of the whole device at each tile shape"""
    whole_waves: tuple[float, ...]
    """wave quantization per tile shape: 1 if a partial last wave costs a whole one, 0 if it costs its share"""
    fade: float  # relative to a GEMM of 1e11 FLOP
    """clock throttling of large GEMMs: x times the work takes x**(1 + fade) times as long"""
    sustained_tflops: float
    """power-limited throughput of large GEMMs"""
    launch_us: float
    """launch time of a GEMM"""
    wave_us: float
    """prologue and epilogue time of a wave of 256x128 tiles"""
    split_us: float
    """split-K: time to reduce partial results"""
    split_share: float
    """split-K: share of the bytes of partial results that counts"""
    memory_gigabytes_per_s: float
    """bandwidth at which a GEMM reads weights"""
    knee: float  # the order of a p-norm
    """how memory time and compute time combine: 1 is their sum, a high value their maximum"""
    grouped_rate: float = 1.0
    """speed of a grouped GEMM over experts relative to one GEMM"""
    int8_rate: float | None = None
    """INT8 throughput relative to 16 bits; null: not supported"""
    fp8_rate: float | None = None
    """FP8 throughput relative to 16 bits, with per-tensor or per-row scales; null: not supported"""
    fp8_block_rate: float | None = None
    """the same with a scale per block of 128 x 128 weights; null: fp8_rate"""
    cast_us: float = 0.0
    """launch time of quantizing a GEMM's input to INT8 or FP8"""
    cast_gigabytes_per_s: float | None = None
    """bandwidth of quantizing, over the bytes read and written; null: fused into the kernel before"""

    def __post_init__(self) -> None:
        key = f"{_KEY}.gemm"
        right = all(re.fullmatch(r"[1-9]\d*x[1-9]\d*", tile) for tile in self.tiles)
        check(f"{key}.tiles", list(self.tiles), bool(self.tiles) and right, "shapes like 256x128")
        for name in ("tflops", "whole_waves"):
            values = getattr(self, name)
            right_length = len(values) == len(self.tiles)
            check(f"{key}.{name}", list(values), right_length, f"{len(self.tiles)} numbers, one per tile shape")
        check(f"{key}.tflops", list(self.tflops), min(self.tflops) > 0, "above 0")
        check(f"{key}.whole_waves", list(self.whole_waves), all(0 <= w <= 1 for w in self.whole_waves), "in [0, 1]")
        check_numbers(self, key)


@dataclass(frozen=True, slots=True, kw_only=True)
class PointwiseConfig:
    """The cost of row-wise kernels (`runtime/simulation/cost/pointwise.py`).

    A kernel takes the longer of two times: its launch plus one row on one multiprocessor, or all its bytes at its
    bandwidth.
    """

    launch_us: float
    """launch time of a row-wise kernel"""
    element_ns: float
    """time per element of a row, on one multiprocessor"""
    norm_gigabytes_per_s: float
    """bandwidth of a norm, over the bytes read and written"""
    rope_gigabytes_per_s: float
    """bandwidth of the rotary embedding"""
    activation_gigabytes_per_s: float
    """bandwidth of the activation function"""
    add_gigabytes_per_s: float
    """bandwidth of the residual addition"""
    copy_gigabytes_per_s: float
    """bandwidth of KV cache writes"""
    embedding_gigabytes_per_s: float
    """bandwidth of the embedding lookup"""

    def __post_init__(self) -> None:
        check_numbers(self, f"{_KEY}.pointwise")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """The cost of attention kernels (`runtime/simulation/cost/attention.py`)."""

    chunk_launch_us: float
    """launch time of prefill attention"""
    chunk_split_us: float
    """split-KV: time to reduce partial results of a short chunk"""
    chunk_tflops: float
    """throughput of the whole device over the prefix"""
    chunk_self: float
    """time per key of the chunk itself, relative to a key of its prefix"""
    chunk_waves: float
    """wave quantization, as in gemm.whole_waves"""
    chunk_spread: float
    """split-KV: time per key relative to work that is balanced over all multiprocessors"""
    chunk_copy_gigabytes_per_s: float
    """bandwidth of copying the chunk's queries, keys, values and outputs"""
    chunk_wave_us: float = 0.0
    """fixed time of a wave of a chunk's blocks"""
    chunk_token_ns: float = 0.0
    """minimum time per key of a block of the chunk without split-KV"""
    chunks_together: bool = False
    """one kernel computes all chunks of a micro-batch, whose blocks then share waves; false: one kernel per chunk"""
    decode_launch_us: float
    """launch time of decode attention"""
    decode_split_us: float
    """split-KV: time to reduce partial results of few decodes"""
    decode_wave_us: float
    """fixed time of a wave of decodes"""
    decode_gigabytes_per_s: float
    """bandwidth at which keys and values are read"""
    decode_waves: float
    """wave quantization, as in gemm.whole_waves"""
    decode_spread: float
    """as chunk_spread, per KV head of a decode"""
    decode_token_ns: float
    """time per context token of a decode that one multiprocessor reads"""
    decode_tokens: float
    """split-KV: context tokens that one multiprocessor reads per wave of decodes"""


AttentionKernels = Literal["flashinfer", "flash_attention", "flash_attention3", "xformers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionFamilies:
    """The cost of attention per kernel library; null: not measured on the device."""

    flashinfer: AttentionConfig | None = None
    flash_attention: AttentionConfig | None = None
    flash_attention3: AttentionConfig | None = None
    xformers: AttentionConfig | None = None

    def __post_init__(self) -> None:
        for kernels in self.known:
            check_numbers(self.of(kernels), f"{_KEY}.attention.{kernels}")

    @property
    def known(self) -> tuple[AttentionKernels, ...]:
        """The libraries with constants."""
        names: tuple[AttentionKernels, ...] = get_args(AttentionKernels)
        return tuple(name for name in names if getattr(self, name) is not None)

    def of(self, kernels: AttentionKernels) -> AttentionConfig:
        """Return the constants of one of the `known` libraries."""
        found: AttentionConfig | None = getattr(self, kernels)
        assert found is not None, kernels
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConfig:
    """The cost of messages over a link (`runtime/simulation/cost/link.py`)."""

    least_us: float
    """latency of a message"""
    ramp_us: float
    """extra time of a 1 MB message; grows with the square root of the bytes"""
    gigabytes_per_s: float
    """bandwidth"""
    knee: float  # the order of a p-norm
    """how least_us and the time of the bytes combine: 1 is their sum, a high value their maximum"""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostConfig:
    """Host overhead of an engine per micro-batch. `simulation.host=false` ignores all of it."""

    step_us: float = 0.0
    """host time per micro-batch on a stage"""
    row_us: float = 0.0
    """host time per sampled token"""
    layer_us: float = 0.0
    """launch time of a layer, overlapped with device compute"""
    floor_us: float = 0.0
    """preparation time of a micro-batch, overlapped with device compute; plus layer_us per layer: minimum stage time"""
    several_us: float = 0.0
    """extra time of a layer in a micro-batch of several decodes, compared with its kernels alone"""
    stretch: float = 1.0
    """kernel time in an engine relative to the kernels alone"""
    prompt_us: float = 0.0
    """host time of a micro-batch with prompt tokens, per rank of a stage"""
    dispatch_us: float = 0.0
    """time from the coordinator's dispatch to the start of the first stage's compute"""
    result_us: float = 0.0
    """time from the end of the last stage's compute to the coordinator's receipt of the result"""
    front_us: float = 0.0
    """time from client to engine that is independent of prompt length: HTTP and parsing"""
    front_token_us: float = 0.0
    """additional time per prompt token: transfer and tokenization"""
    turnaround_us: float = 0.0
    """time between consecutive micro-batches of a stage whose input is ready"""
    bulk_gigabytes_per_s: float = 0.0
    """in-engine bandwidth of all-reduces of bulk_mib or more over more than two ranks; 0: as the kernels alone"""
    byte_tflops: float = 0.0
    """in-engine throughput of large FP8 or INT8 GEMMs; 0: as the kernels alone"""
    bulk_mib: float = 64.0
    """MiB of hidden states from which bulk_gigabytes_per_s applies"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorConfig:
    """The error of predicted stage times: the 10th and the 90th percentile of real / predicted - 1."""

    low: float
    """10th percentile: share by which real times are longer; negative: shorter"""
    high: float
    """90th percentile: share by which real times are longer"""
    source: str
    """what the percentiles were measured on, or why they are assumed"""

    def __post_init__(self) -> None:
        check(f"{_KEY}.error.low", self.low, -1 < self.low < 1, "in (-1, 1)")
        check(f"{_KEY}.error.high", self.high, self.low <= self.high <= 10, f"from {self.low} (low) to 10")


@dataclass(frozen=True, slots=True, kw_only=True)
class CostsConfig:
    """The constants of a device's kernels. Rates are achieved ones, not data-sheet peaks."""

    multiprocessors: int
    """number of multiprocessors (SMs)"""
    gemm: GemmConfig
    pointwise: PointwiseConfig
    attention: AttentionFamilies
    all_reduce: LinkConfig  # within a node; bytes sent per rank: 2 (tp - 1) / tp of the hidden states
    graph_all_reduce: LinkConfig | None = None  # by the engine's own kernel in CUDA graphs; null: as all_reduce
    node: LinkConfig  # point-to-point within a node
    network: LinkConfig  # point-to-point between nodes
    host: HostConfig = field(default_factory=HostConfig)  # of an engine with CUDA graphs
    eager_host: HostConfig | None = None  # of an engine without CUDA graphs; null: unknown
    error: ErrorConfig | None = None  # null: unknown

    def host_of(self, launch: Literal["graphs", "eager"]) -> HostConfig:
        """Return the host overhead for this launch mode; without `eager_host`, always the one with CUDA graphs."""
        return self.host if launch == "graphs" or self.eager_host is None else self.eager_host

    def __post_init__(self) -> None:
        check(f"{_KEY}.multiprocessors", self.multiprocessors, self.multiprocessors >= 1, "1 or more")
        for name in ("all_reduce", "graph_all_reduce", "node", "network", "host", "eager_host"):
            if (part := getattr(self, name)) is not None:
                check_numbers(part, f"{_KEY}.{name}")


_AT_LEAST_ONE = ("knee", "stretch", "spread")
_OR_NONE = ("bulk_gigabytes_per_s", "byte_tflops")  # rates where 0 means none


def check_numbers(config: Any, key: str) -> None:
    """Check the numeric constants under `key`; the range follows from the suffix of a name."""
    for each in fields(config):
        value, name, end = getattr(config, each.name), f"{key}.{each.name}", each.name.rpartition("_")[2]
        if value is None or not isinstance(value, (int, float)):
            continue
        if end in _AT_LEAST_ONE:
            check(name, value, value >= 1, "1 or more")
        elif end == "waves":
            check(name, value, 0 <= value <= 1, "in [0, 1]")
        elif each.name.endswith(("gigabytes_per_s", "tflops", "rate")) and each.name not in _OR_NONE:
            check(name, value, value > 0, "null or above 0" if each.default is None else "above 0")
        else:
            check(name, value, value >= 0, "0 or more")
