"""The protocol of a source of operator times. `measured` and `analytic` implement it; `stage_costs` uses it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from ....conf.costs import HostConfig
from ....parallel.placement import StageLink

# The linear operators of the paper's Table 1, under its names, and the LM head.
Linear = Literal["preproj", "postproj", "ffn_ln1", "ffn_ln2", "head"]
LINEARS: tuple[Linear, ...] = get_args(Linear)
LAYER_LINEARS: tuple[Linear, ...] = LINEARS[:4]


@dataclass(frozen=True, slots=True)
class HostTimes:
    """Host overhead of an engine, in seconds, from constants or a profile (docs/cost_model.md#host).

    Attributes:
        step: per micro-batch, while the device waits: batch tables, sampling.
        row: per sampled token, while the device waits.
        layer: to launch a layer, while the device computes.
        floor: to prepare a micro-batch, while the device computes.
        several: added time per layer with several decodes.
        stretch: how many times longer kernels take in an engine than alone.
        prompt: per micro-batch with prompt tokens, while the device waits.
        front: from a client's send until the engine has the request, and the added time per prompt token.
        dispatch: from the coordinator's dispatch to the start of the first stage's compute.
        result: from the end of the last stage's compute until the coordinator has the result.
        turnaround: from the end of a stage's micro-batch to the start of its next, if the input is ready.
    """

    step: float = 0.0
    row: float = 0.0
    layer: float = 0.0
    floor: float = 0.0
    several: float = 0.0
    stretch: float = 1.0
    prompt: float = 0.0
    front: tuple[float, float] = (0.0, 0.0)
    dispatch: float = 0.0
    result: float = 0.0
    turnaround: float = 0.0

    @classmethod
    def of(cls, config: HostConfig, tp: int) -> HostTimes:
        """Convert constants to host times, for stages of `tp` ranks."""
        return cls(
            step=config.step_us * 1e-6,
            row=config.row_us * 1e-6,
            layer=config.layer_us * 1e-6,
            floor=config.floor_us * 1e-6,
            several=config.several_us * 1e-6,
            stretch=config.stretch,
            prompt=tp * config.prompt_us * 1e-6,
            front=(config.front_us * 1e-6, config.front_token_us * 1e-6),
            dispatch=config.dispatch_us * 1e-6,
            result=config.result_us * 1e-6,
            turnaround=config.turnaround_us * 1e-6,
        )


class Operators(Protocol):
    """Seconds of each operator on one of `tp` tensor-parallel ranks, on one kind of device.

    Layer operators are timed per layer. A source extrapolates beyond its known sizes.
    """

    def linear(self, operator: Linear, rows: int) -> float:
        """Return the seconds of a GEMM over `rows` tokens, with its bias.

        In an MoE layer, `ffn_ln1` and `ffn_ln2` are the grouped GEMMs of the rank's experts.
        """
        ...

    def others(self, rows: int) -> float:
        """Return the seconds of one layer's norms, rotary embedding, activation, residuals and KV-cache writes."""
        ...

    def routing(self, rows: int) -> float:
        """Return the seconds of the router, sorting rows by expert and summing expert outputs; 0 without experts."""
        ...

    def embedding(self, rows: int) -> float:
        """Return the seconds of the token and position embedding, with the all-reduce if ranks hold shards of it."""
        ...

    def chunk_attention(self, length: int, prefix: int) -> float:
        """Return the seconds of one layer's attention of a chunk of `length` tokens that follows `prefix` tokens."""
        ...

    def chunks_attention(self, chunks: Sequence[tuple[int, int]]) -> float:
        """Return the seconds of one layer's attention of several chunks, (length, prefix) each."""
        ...

    def decode_attention(self, requests: int, context: int) -> float:
        """Return the seconds of one layer's attention of `requests` decodes, over `context` KV tokens in total."""
        ...

    def all_reduce(self, rows: int) -> float:
        """Return the seconds of an all-reduce of `rows` tokens' hidden states over the `tp` ranks; 0 for one rank."""
        ...

    def send(self, rows: int, *, link: StageLink, scatter_gather: bool) -> float:
        """Return the seconds to send the hidden states of `rows` tokens from a stage to the next.

        With `scatter_gather`, each of the `tp` ranks sends one shard and the receivers all-gather them (Megatron-LM).
        """
        ...

    @property
    def host(self) -> HostTimes:
        """Host times of a stage."""
        ...
