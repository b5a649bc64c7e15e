"""Operator times of a stage with several kinds of layers: MoE or dense, with or without a sliding window."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ....parallel.placement import StageLink
from .operators import HostTimes, Linear, Operators


class MixedOperators:
    """Operator times averaged over a stage's layers; multiplied by their number, they give the sum. An `Operators`.

    Args:
        sources: the times of each kind of layer.
        counts: how many layers of the stage are of each kind.
    """

    def __init__(self, sources: Sequence[Operators], counts: Sequence[int]) -> None:
        assert len(sources) == len(counts) >= 1
        self._sources = tuple(sources)
        self._shares = [count / sum(counts) for count in counts]

    def _mean(self, seconds: Callable[[Operators], float]) -> float:
        return sum(share * seconds(source) for source, share in zip(self._sources, self._shares, strict=True))

    def linear(self, operator: Linear, rows: int) -> float:
        """See `Operators.linear`."""
        return self._mean(lambda source: source.linear(operator, rows))

    def others(self, rows: int) -> float:
        """See `Operators.others`."""
        return self._mean(lambda source: source.others(rows))

    def routing(self, rows: int) -> float:
        """See `Operators.routing`."""
        return self._mean(lambda source: source.routing(rows))

    def embedding(self, rows: int) -> float:
        """See `Operators.embedding`."""
        return self._sources[0].embedding(rows)

    def chunk_attention(self, length: int, prefix: int) -> float:
        """See `Operators.chunk_attention`."""
        return self._mean(lambda source: source.chunk_attention(length, prefix))

    def chunks_attention(self, chunks: Sequence[tuple[int, int]]) -> float:
        """See `Operators.chunks_attention`."""
        return self._mean(lambda source: source.chunks_attention(chunks))

    def decode_attention(self, requests: int, context: int) -> float:
        """See `Operators.decode_attention`."""
        return self._mean(lambda source: source.decode_attention(requests, context))

    def all_reduce(self, rows: int) -> float:
        """See `Operators.all_reduce`."""
        return self._sources[0].all_reduce(rows)

    def send(self, rows: int, *, link: StageLink, scatter_gather: bool) -> float:
        """See `Operators.send`."""
        return self._sources[0].send(rows, link=link, scatter_gather=scatter_gather)

    @property
    def host(self) -> HostTimes:
        """Host times of the stage."""
        return self._sources[0].host
