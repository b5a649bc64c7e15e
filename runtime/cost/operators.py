"""The seam between the two sources of operator times, `measured` and `analytic`, and what is composed of them."""

from __future__ import annotations

from typing import Literal, Protocol, get_args

# Paper Table 1, with the feed-forward layers under its names; `head` is the LM head.
Linear = Literal["preproj", "postproj", "ffn_ln1", "ffn_ln2", "head"]
LINEARS: tuple[Linear, ...] = get_args(Linear)
LAYER_LINEARS: tuple[Linear, ...] = LINEARS[:4]


class Operators(Protocol):
    """Seconds that one rank takes for each operator of one model, cut in `tp` slices, on one kind of device.

    Times of a layer's operators are those of one layer. Outside of what it knows a source extrapolates by its physics.
    """

    def linear(self, operator: Linear, rows: int) -> float:
        """A matrix product over `rows` tokens, its bias included."""
        ...

    def others(self, rows: int) -> float:
        """Norms, rotary embedding, activation, residuals and writes to the KV cache, of one layer."""
        ...

    def embedding(self, rows: int) -> float:
        """Token (and position) embedding, the all-reduce of its slices, if such, included."""
        ...

    def chunk_attention(self, length: int, prefix: int) -> float:
        """Attention of a chunk of `length` tokens over itself and the `prefix` tokens before it; one layer."""
        ...

    def decode_attention(self, requests: int, context: int) -> float:
        """Attention of `requests` decodes over `context` tokens of KV cache in sum; one layer."""
        ...

    def all_reduce(self, rows: int) -> float:
        """Of the hidden states of `rows` tokens over the `tp` ranks; 0 for one rank."""
        ...

    def send(self, rows: int, *, between_nodes: bool, scatter_gather: bool) -> float:
        """Hidden states of `rows` tokens to the next stage: from when they are computed until they are there.

        With `scatter_gather` each of the `tp` ranks sends a slice and the receivers gather them (Megatron-LM).
        """
        ...

    @property
    def layer_overhead(self) -> float:
        """Host time of a layer that nothing hides, beside its operators."""
        ...

    @property
    def micro_batch_overhead(self) -> float:
        """Host time of a stage for a micro-batch that nothing hides: making its batch, what sampling always takes."""
        ...
