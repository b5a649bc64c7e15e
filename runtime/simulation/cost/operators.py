"""The protocol of a source of operator times. `measured` and `analytic` implement it; `stage_costs` uses it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from ...conf.costs import HostConfig
from ...parallel.placement import StageLink

# The linear operators of the paper's Table 1, under its names, and the LM head.
Linear = Literal["preproj", "postproj", "ffn_ln1", "ffn_ln2", "head"]
LINEARS: tuple[Linear, ...] = get_args(Linear)
LAYER_LINEARS: tuple[Linear, ...] = LINEARS[:4]


@dataclass(frozen=True, slots=True)
class HostTimes:
    """What an engine's host takes, in seconds. Constants and a profile both give it (docs/cost_model.md#host).

    Attributes:
        step: for the micro-batch, while the device waits: batch tables, sampling.
        row: the same for each token that is sampled.
        layer: to launch a layer, while the device computes.
        floor: to prepare a micro-batch, while the device computes.
        several: what a layer takes longer with several decodes.
        stretch: how many times longer kernels take in an engine than alone.
        prompt: for a micro-batch with prompt tokens, while the device waits.
        front: from a client's sending until the engine has the request, and what each prompt token adds to it.
        dispatch: from the coordinator's dispatch to the begin of the first stage's compute.
        result: from the end of the last stage's compute until the coordinator has the result.
        turnaround: from the end of a stage's micro-batch to the begin of its next, whose input is there.
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
        """Return the times of constants, for stages of `tp` ranks."""
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
    """The seconds that one rank takes for each operator of a model in `tp` slices, on one kind of device.

    Times of a layer's operators are those of one layer. A source extrapolates beyond the sizes that it knows.
    """

    def linear(self, operator: Linear, rows: int) -> float:
        """Return the seconds of a matrix product over `rows` tokens, with its bias.

        In a layer of experts, `ffn_ln1` and `ffn_ln2` are the products of all experts that a rank computes.
        """
        ...

    def others(self, rows: int) -> float:
        """Return the seconds of one layer's norms, rotary embedding, activation, residuals and KV-cache writes."""
        ...

    def routing(self, rows: int) -> float:
        """Return the seconds that a layer of experts takes beside its products; 0 without experts.

        They go to the router, to sorting rows by expert and to summing the experts' outputs.
        """
        ...

    def embedding(self, rows: int) -> float:
        """Return the seconds of the token and position embedding, with the all-reduce if ranks hold slices of it."""
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
        """Return the seconds from when a stage has computed the hidden states of `rows` tokens until the next has them.

        With `scatter_gather`, each of the `tp` ranks sends one slice and the receivers gather them (Megatron-LM).
        """
        ...

    @property
    def host(self) -> HostTimes:
        """What a stage's host takes for a micro-batch."""
        ...
