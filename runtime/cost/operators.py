"""The protocol of a source of operator times. `measured` and `analytic` implement it; `stage_costs` uses it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from ...parallel.placement import StageLink

# The linear operators of the paper's Table 1, under its names, and the LM head.
Linear = Literal["preproj", "postproj", "ffn_ln1", "ffn_ln2", "head"]
LINEARS: tuple[Linear, ...] = get_args(Linear)
LAYER_LINEARS: tuple[Linear, ...] = LINEARS[:4]


@dataclass(frozen=True, slots=True)
class HostTimes:
    """What a stage's host takes for a micro-batch, in seconds.

    Attributes:
        step: for the micro-batch, while the device waits: batch tables, sampling.
        row: the same for each token that is sampled.
        layer: to launch a layer, while the device computes.
        stretch: how many times longer kernels take in an engine than alone.
    """

    step: float = 0.0
    row: float = 0.0
    layer: float = 0.0
    stretch: float = 1.0


class Operators(Protocol):
    """The seconds that one rank takes for each operator of a model in `tp` slices, on one kind of device.

    Times of a layer's operators are those of one layer. A source extrapolates beyond the sizes that it knows.
    """

    def linear(self, operator: Linear, rows: int) -> float:
        """Return the seconds of a matrix product over `rows` tokens, with its bias."""
        ...

    def others(self, rows: int) -> float:
        """Return the seconds of one layer's norms, rotary embedding, activation, residuals and KV-cache writes."""
        ...

    def embedding(self, rows: int) -> float:
        """Return the seconds of the token and position embedding, with the all-reduce if ranks hold slices of it."""
        ...

    def chunk_attention(self, length: int, prefix: int) -> float:
        """Return the seconds of one layer's attention of a chunk of `length` tokens that follows `prefix` tokens."""
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
