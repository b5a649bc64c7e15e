"""Constants of the analytic cost model for one kind of device; `conf/hardware/*.yaml` names the source of each."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from typing import Any

from .errors import check

_KEY = "hardware.costs"


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmConfig:
    """Matrix products in tiles (`runtime/cost/gemm.py`).

    Three lists of one length: shapes of tiles that a library chooses among (each lies either way), the rate of the
    device at each, and how much of a last wave that is not full is paid for: 1 all of it, 0 only its tiles.
    """

    tiles: tuple[str, ...]
    tflops: tuple[float, ...]
    whole_waves: tuple[float, ...]
    fade: float  # a product of 1e11 FLOP times x takes x ** fade times as long by the FLOP: clocks fall
    sustained_tflops: float  # of the whole device, however tiles fall
    launch_us: float
    wave_us: float  # what a wave of tiles takes beside its products: reading the first operands, writing results
    split_us: float  # of adding up, where the inner dimension is split
    split_share: float  # of the bytes of partial results, at memory_gbps
    memory_gbps: float
    knee: float  # memory and compute time are joined by the norm of this order: high is the longer one of both

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
        _check_positive(self, key, ("sustained_tflops", "memory_gbps"))
        check(f"{key}.knee", self.knee, self.knee >= 1, "1 or more")
        _check_not_negative(self, key, ("fade", "launch_us", "wave_us", "split_us", "split_share"))


@dataclass(frozen=True, slots=True, kw_only=True)
class PointwiseConfig:
    """Kernels that compute row by row (`runtime/cost/pointwise.py`): the longer one of a launch with a row's way
    through a multiprocessor, and of all bytes at the kernel's rate."""

    launch_us: float
    element_ns: float  # a row's way, by its elements
    norm_gbps: float
    rope_gbps: float
    activation_gbps: float
    add_gbps: float
    copy_gbps: float  # writes to the KV cache
    embedding_gbps: float

    def __post_init__(self) -> None:
        key = f"{_KEY}.pointwise"
        _check_not_negative(self, key, ("launch_us", "element_ns"))
        _check_positive(self, key, [f.name for f in fields(self) if f.name.endswith("_gbps")])


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """Attention kernels (`runtime/cost/attention.py`)."""

    chunk_launch_us: float
    chunk_split_us: float  # of adding up, where the keys of few blocks are split
    chunk_tflops: float  # over the prefix, with every multiprocessor at work
    chunk_self: float  # time of a token of the chunk's own, by that of one of the prefix
    chunk_waves: float  # as GemmConfig.whole_waves
    chunk_spread: float  # how many multiprocessors' work one block of queries can be spread over
    chunk_copy_gbps: float  # queries, keys, values and outputs of the chunk
    decode_launch_us: float
    decode_split_us: float  # of adding up, where keys are split
    decode_wave_us: float  # what a wave of blocks takes beside its keys
    decode_gbps: float  # of keys and values
    decode_waves: float  # as GemmConfig.whole_waves
    decode_spread: float  # as chunk_spread, of a request's KV head
    decode_token_ns: float  # the way of one request through its keys, by token
    decode_tokens: float  # which splitting cuts to so many, by wave of blocks

    def __post_init__(self) -> None:
        key = f"{_KEY}.attention"
        for name in ("chunk_waves", "decode_waves"):
            check(f"{key}.{name}", getattr(self, name), 0 <= getattr(self, name) <= 1, "in [0, 1]")
        for name in ("chunk_spread", "decode_spread"):
            check(f"{key}.{name}", getattr(self, name), getattr(self, name) >= 1, "1 or more")
        _check_positive(self, key, ("chunk_tflops", "chunk_copy_gbps", "decode_gbps"))
        others = ("chunk_launch_us", "chunk_split_us", "chunk_self", "decode_launch_us", "decode_split_us")
        _check_not_negative(self, key, (*others, "decode_wave_us", "decode_token_ns", "decode_tokens"))


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConfig:
    """Messages over a link (`runtime/cost/communication.py`)."""

    least_us: float
    ramp_us: float  # at 1 MB; it grows with the root of the bytes, as pipelined protocols fill
    gbps: float
    knee: float  # least time and that of the bytes are joined by the norm of this order; 1 adds them


@dataclass(frozen=True, slots=True, kw_only=True)
class HostConfig:
    """What the host adds that the device does not hide."""

    step_us: float = 0.0  # a stage's, for a micro-batch
    layer_us: float = 0.0

    def __post_init__(self) -> None:
        _check_not_negative(self, f"{_KEY}.host", ("step_us", "layer_us"))


@dataclass(frozen=True, slots=True, kw_only=True)
class CostsConfig:
    """A device by its kernels. Rates are what these reach, not what the data sheet says."""

    multiprocessors: int
    gemm: GemmConfig
    pointwise: PointwiseConfig
    attention: AttentionConfig
    all_reduce: LinkConfig  # bytes are those a rank sends: 2 (tp - 1) / tp of the hidden states
    node: LinkConfig  # a rank's to one within the node
    network: LinkConfig  # a rank's to another node
    host: HostConfig = field(default_factory=HostConfig)

    def __post_init__(self) -> None:
        check(f"{_KEY}.multiprocessors", self.multiprocessors, self.multiprocessors >= 1, "1 or more")
        for name in ("all_reduce", "node", "network"):
            key, link = f"{_KEY}.{name}", getattr(self, name)
            _check_positive(link, key, ("gbps",))
            _check_not_negative(link, key, ("least_us", "ramp_us"))
            check(f"{key}.knee", link.knee, link.knee >= 1, "1 or more")


def _check_positive(config: Any, key: str, names: tuple[str, ...] | list[str]) -> None:
    for name in names:
        value = getattr(config, name)
        check(f"{key}.{name}", value, value > 0, "above 0")


def _check_not_negative(config: Any, key: str, names: tuple[str, ...]) -> None:
    for name in names:
        value = getattr(config, name)
        check(f"{key}.{name}", value, value >= 0, "0 or more")
