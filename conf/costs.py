"""The constants of the analytic cost model for one kind of device; `conf/hardware/*.yaml` names their sources."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from .errors import check

_KEY = "hardware.costs"


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmConfig:
    """The cost of matrix products in tiles (`runtime/cost/gemm.py`).

    `tiles`, `tflops` and `whole_waves` have a value for each tile shape. A library chooses among these shapes and their
    transposes.
    """

    tiles: tuple[str, ...]
    """shapes of the tiles that matrix products are computed in"""
    tflops: tuple[float, ...]
    """rate of the device at each tile shape, with every multiprocessor at work"""
    whole_waves: tuple[float, ...]
    """for each tile shape: 1 where a last, partial wave of tiles costs a whole one, 0 where it costs its share"""
    fade: float  # relative to a product of 1e11 FLOP
    """how clocks fall as products grow: x times the work takes x**(1 + fade) times as long"""
    sustained_tflops: float
    """rate of large matrix products that the device's power can sustain"""
    launch_us: float
    """time to launch a matrix product"""
    wave_us: float  # to read the first operands and to write results
    """time that a wave of 256x128 tiles takes beside its products"""
    split_us: float
    """time to add up partial results, where the inner dimension is split"""
    split_share: float
    """share of the bytes of partial results that costs time"""
    memory_gigabytes_per_s: float
    """rate at which a matrix product reads weights"""
    knee: float  # order of the norm that joins the two times
    """how memory time and compute time join: 1 adds them, a high value takes the longer one"""
    grouped_rate: float = 1.0
    """how many times as fast kernels compute the products of a layer of experts as one product"""
    int8_rate: float | None = None
    """how many times faster the device multiplies INT8 numbers than 16-bit ones; null: it multiplies none"""
    fp8_rate: float | None = None
    """the same of FP8 numbers, with a scale for a tensor or a row"""
    fp8_block_rate: float | None = None
    """the same with a scale for each block of 128 x 128 weights; null: fp8_rate"""
    cast_us: float = 0.0
    """time to launch the rounding of a product's input to INT8 or FP8"""
    cast_gigabytes_per_s: float | None = None
    """rate of that, over the bytes read and written; null: it is part of the kernel before"""

    def __post_init__(self) -> None:
        key = f"{_KEY}.gemm"
        right = all(re.fullmatch(r"[1-9]\d*x[1-9]\d*", tile) for tile in self.tiles)
        check(f"{key}.tiles", list(self.tiles), bool(self.tiles) and right, "shapes like 256x128")
        for name in ("tflops", "whole_waves"):
            values = getattr(self, name)
            right_length = len(values) == len(self.tiles)
            check(f"{key}.{name}", list(values), right_length, f"{len(self.tiles)} numbers, one a tile")
        check(f"{key}.tflops", list(self.tflops), min(self.tflops) > 0, "above 0")
        check(f"{key}.whole_waves", list(self.whole_waves), all(0 <= w <= 1 for w in self.whole_waves), "in [0, 1]")
        check_numbers(self, key)


@dataclass(frozen=True, slots=True, kw_only=True)
class PointwiseConfig:
    """The cost of kernels that compute row by row (`runtime/cost/pointwise.py`).

    A kernel takes the longer of two times: its launch plus one row on a multiprocessor, or all its bytes at its rate.
    """

    launch_us: float
    """time to launch a kernel that computes row by row"""
    element_ns: float
    """time per element of a row, on one multiprocessor"""
    norm_gigabytes_per_s: float
    """rate of a norm, over the bytes read and written"""
    rope_gigabytes_per_s: float
    """rate of the rotary embedding"""
    activation_gigabytes_per_s: float
    """rate of the activation function"""
    add_gigabytes_per_s: float
    """rate of adding the residual"""
    copy_gigabytes_per_s: float
    """rate of writes to the KV cache"""
    embedding_gigabytes_per_s: float
    """rate of the embedding lookup"""

    def __post_init__(self) -> None:
        check_numbers(self, f"{_KEY}.pointwise")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """The cost of attention kernels (`runtime/cost/attention.py`)."""

    chunk_launch_us: float
    """time to launch a chunk's attention"""
    chunk_split_us: float
    """time to add up partial results, where the keys of a short chunk are split"""
    chunk_tflops: float
    """rate over the prefix, with every multiprocessor at work"""
    chunk_self: float
    """time per key of the chunk itself, relative to a key of its prefix"""
    chunk_waves: float
    """as gemm.whole_waves"""
    chunk_spread: float
    """time per key where keys are split, relative to work that is spread evenly over all multiprocessors"""
    chunk_copy_gigabytes_per_s: float
    """rate of copies of the chunk's queries, keys, values and outputs"""
    chunk_wave_us: float = 0.0
    """time that a wave of a chunk's blocks takes beside its keys"""
    chunk_token_ns: float = 0.0
    """least time per key of a block of the chunk, where its keys are not split"""
    chunks_together: bool = False
    """whether one kernel computes all chunks of a micro-batch, whose blocks then share the waves; else one a chunk"""
    decode_launch_us: float
    """time to launch the decodes' attention"""
    decode_split_us: float
    """time to add up partial results, where the keys of few decodes are split"""
    decode_wave_us: float
    """time that a wave of decodes takes beside its keys and values"""
    decode_gigabytes_per_s: float
    """rate at which keys and values are read"""
    decode_waves: float
    """as gemm.whole_waves"""
    decode_spread: float
    """as chunk_spread, for a KV head of a decode"""
    decode_token_ns: float
    """time per token of a decode's context, where one multiprocessor reads it"""
    decode_tokens: float
    """tokens of a context that one multiprocessor reads where keys are split, per wave of decodes"""


AttentionKernels = Literal["flashinfer", "flash_attention", "flash_attention3", "xformers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionFamilies:
    """The cost of attention with each library's kernels; null where their times on the device are not known."""

    flashinfer: AttentionConfig | None = None
    flash_attention: AttentionConfig | None = None
    flash_attention3: AttentionConfig | None = None
    xformers: AttentionConfig | None = None

    def __post_init__(self) -> None:
        for kernels in self.known:
            check_numbers(self.of(kernels), f"{_KEY}.attention.{kernels}")

    @property
    def known(self) -> tuple[AttentionKernels, ...]:
        """The libraries whose times are known."""
        names: tuple[AttentionKernels, ...] = get_args(AttentionKernels)
        return tuple(name for name in names if getattr(self, name) is not None)

    def of(self, kernels: AttentionKernels) -> AttentionConfig:
        """Return the constants of a library that is known."""
        found: AttentionConfig | None = getattr(self, kernels)
        assert found is not None, kernels
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConfig:
    """The cost of messages over a link (`runtime/cost/link.py`)."""

    least_us: float
    """shortest time of a message"""
    ramp_us: float
    """extra time of a message of 1 MB; it grows with the square root of the bytes"""
    gigabytes_per_s: float
    """rate of a message"""
    knee: float  # order of the norm that joins the two times
    """how least_us and the time of the bytes join: 1 adds them, a high value takes the longer one"""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostConfig:
    """The time that an engine's host takes for a micro-batch. `simulation.host=false` leaves all of it out."""

    step_us: float = 0.0
    """time that the host adds to a stage per micro-batch"""
    row_us: float = 0.0
    """time that is added per token that is sampled"""
    layer_us: float = 0.0
    """time to launch a layer, while the device computes"""
    floor_us: float = 0.0
    """time to prepare a micro-batch, while the device computes: a stage takes at least that and layer_us a layer"""
    several_us: float = 0.0
    """time that a layer takes longer in a micro-batch of several decodes than its kernels do alone"""
    stretch: float = 1.0
    """how many times longer kernels take in an engine than alone"""
    prompt_us: float = 0.0
    """time that a micro-batch with prompt tokens adds per rank of a stage"""
    dispatch_us: float = 0.0
    """time from the coordinator's dispatch to the begin of the first stage's compute"""
    result_us: float = 0.0
    """time from the end of the last stage's compute until the coordinator has the result"""
    front_us: float = 0.0
    """time from a client's sending until the engine has the request: HTTP, and what does not depend on the prompt"""
    front_token_us: float = 0.0
    """time that is added to front_us per prompt token: its transfer and tokenization"""
    turnaround_us: float = 0.0
    """time from the end of a stage's micro-batch to the begin of its next one, if the input is already there"""
    bulk_gigabytes_per_s: float = 0.0
    """rate, in an engine, of all-reduces of bulk_mib or more by over two ranks; 0: that of the kernels alone"""
    byte_tflops: float = 0.0
    """rate, in an engine, of large products of FP8 or INT8 numbers; 0: that of the kernels alone"""
    bulk_mib: float = 64.0
    """MiB of hidden states from which bulk_gigabytes_per_s holds"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorConfig:
    """The error of predicted stage times: the 10th and the 90th percentile of real / predicted - 1."""

    low: float
    """share by which real times are longer at the low end; below 0 they are shorter"""
    high: float
    """share by which they are longer at the high end"""
    source: str
    """what the two were measured on, or why they are assumed"""

    def __post_init__(self) -> None:
        check(f"{_KEY}.error.low", self.low, -1 < self.low < 1, "in (-1, 1)")
        check(f"{_KEY}.error.high", self.high, self.low <= self.high <= 10, f"from {self.low} (low) to 10")


@dataclass(frozen=True, slots=True, kw_only=True)
class CostsConfig:
    """The constants of a device's kernels. Rates are those that kernels reach, not those of the data sheet."""

    multiprocessors: int
    """multiprocessors of the device, among which kernels deal their tiles"""
    gemm: GemmConfig
    pointwise: PointwiseConfig
    attention: AttentionFamilies
    all_reduce: LinkConfig  # within a node; it counts the bytes that a rank sends, 2 (tp - 1) / tp of the hidden states
    graph_all_reduce: LinkConfig | None = None  # the same by the engine's own kernel in a graph; null: as all_reduce
    node: LinkConfig  # sends within a node
    network: LinkConfig  # sends between nodes
    host: HostConfig = field(default_factory=HostConfig)  # of an engine with CUDA graphs
    eager_host: HostConfig | None = None  # of an engine without CUDA graphs; null: not known
    error: ErrorConfig | None = None  # null: not known

    def host_of(self, launch: Literal["graphs", "eager"]) -> HostConfig:
        """Return the host of an engine that launches so. Without `eager_host`, that is always the one with graphs."""
        return self.host if launch == "graphs" or self.eager_host is None else self.eager_host

    def __post_init__(self) -> None:
        check(f"{_KEY}.multiprocessors", self.multiprocessors, self.multiprocessors >= 1, "1 or more")
        for name in ("all_reduce", "graph_all_reduce", "node", "network", "host", "eager_host"):
            if (part := getattr(self, name)) is not None:
                check_numbers(part, f"{_KEY}.{name}")


_AT_LEAST_ONE = ("knee", "stretch", "spread")
_OR_NONE = ("bulk_gigabytes_per_s", "byte_tflops")  # rates of which 0 says that there is none


def check_numbers(config: Any, key: str) -> None:
    """Check the numbers of constants that `key` names; what is right follows from the ends of their names."""
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
