"""The operators of a stage by weights that were learned of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...parallel.placement import StageLink
from ..cost.operators import HostTimes, Linear

NUM_ATTENTION = 4  # weights: a chunk, a pair of its tokens with those before, a decode, context
NUM_OTHER = 3  # weights: the micro-batch, the head, a sampled row


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Seconds that a layer, the head and a stage's host take, on a stage of speed 1.

    The time of a layer's products may bend either way at each of `knots`, numbers of rows: few rows are bound by
    reading weights, and many by arithmetic. It may also grow in steps of `tile` rows.
    """

    knots: tuple[int, ...]
    tile: int
    values: tuple[float, ...]  # of the columns of `product_columns`, of attention, and the others

    def products(self, rows: int) -> float:
        """Return the seconds of a layer's products over `rows`."""
        columns = product_columns(rows, self.knots, self.tile)
        return sum(weight * column for weight, column in zip(self.values, columns, strict=False))

    @property
    def attention(self) -> tuple[float, ...]:
        """Seconds of a chunk, of a pair of tokens as of `pairs`, of a decode and of a token of context."""
        return self.values[-NUM_OTHER - NUM_ATTENTION : -NUM_OTHER]

    @property
    def others(self) -> tuple[float, ...]:
        """Seconds of the host for a micro-batch, of the head, and of the head a sampled row."""
        return self.values[-NUM_OTHER:]


def product_columns(rows: float, knots: Sequence[int], tile: int) -> list[float]:
    """Return what the seconds of a layer's products are linear in.

    That is 1, the rows, the rows padded to tiles, and of each knot the rows up to it and those beyond.
    """
    padded = -(-rows // tile) * tile
    return [1.0, rows, padded, *(min(rows, knot) for knot in knots), *(max(0, rows - knot) for knot in knots)]


def pairs(length: int, prefix: int) -> float:
    """Return how many pairs of a chunk's tokens with those before them attention computes."""
    return length * (prefix + length / 2)


@dataclass(frozen=True, slots=True)
class LinkSeconds:
    """Seconds from a stage's end to the begin of the next, which waited: for a message, and a row."""

    message: float
    row: float

    def __call__(self, rows: int) -> float:
        """Return the seconds of a message of `rows` rows."""
        return self.message + self.row * rows


class LearnedOperators:
    """The operators of one stage, by weights that were learned. An `Operators`.

    Args:
        key_share: share of a layer's products in those of queries, keys and values.
        slower: how many times longer the stage takes than one of speed 1.
        slices: of each product, so many times as many ranks hold slices as in the run.
        link: to the next stage; None after the last.
    """

    def __init__(
        self,
        weights: LayerWeights,
        *,
        key_share: float,
        slower: float,
        slices: float = 1.0,
        link: LinkSeconds | None = None,
    ) -> None:
        self.weights = weights
        self.key_share = key_share
        self.slower = slower
        self.slices = slices
        self.link = link
        share = slower / slices
        step, self._head, self._sampled_row = (slower * seconds for seconds in weights.others)
        self._chunk, self._pair, self._decode, self._context = (share * seconds for seconds in weights.attention)
        self.host = HostTimes(step=step)
        self._share = share

    def linear(self, operator: Linear, rows: int) -> float:
        """Return a product's seconds: all that do not make queries, keys and values count as `ffn_ln1`."""
        if operator == "head":
            return (self._head + self._sampled_row * rows) / self.slices
        if operator == "preproj":
            return self._share * self.key_share * self.weights.products(rows)
        return self._share * (1 - self.key_share) * self.weights.products(rows) if operator == "ffn_ln1" else 0.0

    def others(self, rows: int) -> float:
        """Return 0: the weights of the products hold these too."""
        return 0.0  # in the products

    def routing(self, rows: int) -> float:
        """Return 0: the weights of the products hold it too."""
        return 0.0

    def embedding(self, rows: int) -> float:
        """Return 0: the weights of the products hold it too."""
        return 0.0

    def chunk_attention(self, length: int, prefix: int) -> float:
        """See `Operators.chunk_attention`. It is linear in `pairs`."""
        return self._chunk + self._pair * pairs(length, prefix)

    def chunks_attention(self, chunks: Sequence[tuple[int, int]]) -> float:
        """See `Operators.chunks_attention`. Each takes the time that it takes alone."""
        return sum(self.chunk_attention(length, prefix) for length, prefix in chunks)

    def decode_attention(self, requests: int, context: int) -> float:
        """See `Operators.decode_attention`. It is linear in both arguments."""
        return self._decode * requests + self._context * context

    def all_reduce(self, rows: int) -> float:
        """Return the seconds of a sum over ranks where the run had none, as long as two sends of a rank's share."""
        if self.slices <= 1 or self.link is None:
            return 0.0
        return 2 * self.link.message + 2 * (1 - 1 / self.slices) * self.link.row * rows

    def send(self, rows: int, *, link: StageLink, scatter_gather: bool) -> float:
        """Return the seconds to the next stage's begin; 0 where no link was learned, as on the last stage."""
        return self.link(rows) if self.link is not None else 0.0

    def drawn(self, weights: LayerWeights) -> LearnedOperators:
        """Return the same stage by other weights."""
        return LearnedOperators(
            weights, key_share=self.key_share, slower=self.slower, slices=self.slices, link=self.link
        )

    def at_speed(self, slower: float) -> LearnedOperators:
        """Return the same stage on a device that takes `slower` times as long as one of speed 1."""
        return LearnedOperators(
            self.weights, key_share=self.key_share, slower=slower, slices=self.slices, link=self.link
        )
