"""The operators of a stage by weights learned from a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ....parallel.placement import StageLink
from ...simulation.cost.operators import HostTimes, Linear

NUM_ATTENTION = 4  # weights: per chunk, per pair of its tokens with previous tokens, per decode, per context token
NUM_OTHER = 3  # weights: per micro-batch, per use of the head, per sampled row


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Times of a layer, the head and a stage's host, in seconds on a stage of speed 1.

    The time of a layer's GEMMs may bend either way at each of `knots`, numbers of rows: few rows are bound by reading
    weights, and many by arithmetic. It may also grow in steps of `tile` rows.
    """

    knots: tuple[int, ...]
    tile: int
    values: tuple[float, ...]  # weights of the columns of `product_columns`, of attention, and the others

    def products(self, rows: int) -> float:
        """Return the seconds of a layer's GEMMs over `rows`."""
        columns = product_columns(rows, self.knots, self.tile)
        return sum(weight * column for weight, column in zip(self.values, columns, strict=False))

    @property
    def attention(self) -> tuple[float, ...]:
        """Seconds per chunk, per pair of tokens as in `pairs`, per decode and per context token."""
        return self.values[-NUM_OTHER - NUM_ATTENTION : -NUM_OTHER]

    @property
    def others(self) -> tuple[float, ...]:
        """Seconds of the host per micro-batch, of the head, and of the head per sampled row."""
        return self.values[-NUM_OTHER:]


def product_columns(rows: float, knots: Sequence[int], tile: int) -> list[float]:
    """Return the features in which the time of a layer's GEMMs is linear.

    They are 1, the rows, the rows padded to tiles, and for each knot the rows up to it and the rows beyond it.
    """
    padded = -(-rows // tile) * tile
    return [1.0, rows, padded, *(min(rows, knot) for knot in knots), *(max(0, rows - knot) for knot in knots)]


def pairs(length: int, prefix: int) -> float:
    """Return the approximate number of query-key pairs in the attention of a chunk."""
    return length * (prefix + length / 2)


@dataclass(frozen=True, slots=True)
class LinkSeconds:
    """Link time from a stage's end to the start of the waiting next stage, in seconds: per message and per row."""

    message: float
    row: float

    def __call__(self, rows: int) -> float:
        """Return the seconds of a message with `rows` rows."""
        return self.message + self.row * rows


class LearnedOperators:
    """The operators of one stage, by learned weights. An `Operators`.

    Args:
        key_share: share of the QKV projections in a layer's GEMMs.
        slower: slowdown of the stage relative to one of speed 1.
        link: to the next stage; None after the last.
    """

    def __init__(
        self, weights: LayerWeights, *, key_share: float, slower: float, link: LinkSeconds | None = None
    ) -> None:
        self.weights = weights
        self.key_share = key_share
        self.slower = slower
        self.link = link
        step, self._head, self._sampled_row = (slower * seconds for seconds in weights.others)
        self._chunk, self._pair, self._decode, self._context = (slower * seconds for seconds in weights.attention)
        self.host = HostTimes(step=step)

    def linear(self, operator: Linear, rows: int) -> float:
        """Return a GEMM's seconds; all GEMMs of a layer but the QKV projections count as `ffn_ln1`."""
        if operator == "head":
            return self._head + self._sampled_row * rows
        if operator == "preproj":
            return self.slower * self.key_share * self.weights.products(rows)
        return self.slower * (1 - self.key_share) * self.weights.products(rows) if operator == "ffn_ln1" else 0.0

    def others(self, rows: int) -> float:
        """Return 0: included in the weights of the GEMMs."""
        return 0.0

    routing = embedding = all_reduce = others

    def chunk_attention(self, length: int, prefix: int) -> float:
        """See `Operators.chunk_attention`. It is linear in `pairs`."""
        return self._chunk + self._pair * pairs(length, prefix)

    def chunks_attention(self, chunks: Sequence[tuple[int, int]]) -> float:
        """See `Operators.chunks_attention`. The sum over the chunks, each computed alone."""
        return sum(self.chunk_attention(length, prefix) for length, prefix in chunks)

    def decode_attention(self, requests: int, context: int) -> float:
        """See `Operators.decode_attention`. It is linear in both arguments."""
        return self._decode * requests + self._context * context

    def send(self, rows: int, *, link: StageLink, scatter_gather: bool) -> float:
        """Return the seconds until the next stage starts; 0 if no link was learned, as on the last stage."""
        return self.link(rows) if self.link is not None else 0.0

    def at_speed(self, slower: float) -> LearnedOperators:
        """Return the same stage on a device of another speed."""
        return LearnedOperators(self.weights, key_share=self.key_share, slower=slower, link=self.link)
