"""Operators some of which take longer or shorter than those of a setting: a slower node, a faster link."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...parallel.placement import StageLink
from ..cost.operators import HostTimes, Linear, Operators
from ..cost.stage_costs import StageCosts
from .learned_operators import LayerWeights, LearnedOperators


class ScaledOperators:
    """The operators of a stage, all of whose computation takes `compute` times as long, and sends `send` times."""

    def __init__(self, source: Operators, compute: float = 1.0, send: float = 1.0) -> None:
        self.source = source
        self.compute = compute
        self.sends = send

    @property
    def host(self) -> HostTimes:
        """The host's times; those in which the device waits or computes are scaled as computation is."""
        host = self.source.host
        return replace(
            host,
            step=self.compute * host.step,
            row=self.compute * host.row,
            layer=self.compute * host.layer,
            floor=self.compute * host.floor,
            several=self.compute * host.several,
            prompt=self.compute * host.prompt,
        )

    def linear(self, operator: Linear, rows: int) -> float:
        """See `Operators.linear`."""
        return self.compute * self.source.linear(operator, rows)

    def others(self, rows: int) -> float:
        """See `Operators.others`."""
        return self.compute * self.source.others(rows)

    def routing(self, rows: int) -> float:
        """See `Operators.routing`."""
        return self.compute * self.source.routing(rows)

    def embedding(self, rows: int) -> float:
        """See `Operators.embedding`."""
        return self.compute * self.source.embedding(rows)

    def chunk_attention(self, length: int, prefix: int) -> float:
        """See `Operators.chunk_attention`."""
        return self.compute * self.source.chunk_attention(length, prefix)

    def chunks_attention(self, chunks: Sequence[tuple[int, int]]) -> float:
        """See `Operators.chunks_attention`."""
        return self.compute * self.source.chunks_attention(chunks)

    def decode_attention(self, requests: int, context: int) -> float:
        """See `Operators.decode_attention`."""
        return self.compute * self.source.decode_attention(requests, context)

    def all_reduce(self, rows: int) -> float:
        """See `Operators.all_reduce`. It counts as computation."""
        return self.compute * self.source.all_reduce(rows)

    def send(self, rows: int, *, link: StageLink, scatter_gather: bool) -> float:
        """See `Operators.send`."""
        return self.sends * self.source.send(rows, link=link, scatter_gather=scatter_gather)


def scaled_costs(costs: StageCosts, *, stages: Sequence[float] | None = None, links: float = 1.0) -> StageCosts:
    """Return costs whose stages take `stages` times as long, one factor each, and links `links` times."""
    factors = stages or [1.0] * costs.num_stages
    assert len(factors) == costs.num_stages
    return costs.with_operators(
        [ScaledOperators(source, factor, links) for source, factor in zip(costs.operators, factors, strict=True)]
    )


def drawn_costs(costs: StageCosts, weights: LayerWeights) -> StageCosts:
    """Return learned costs by other weights; others as they are."""
    return costs.with_operators([_drawn(source, weights) for source in costs.operators])


def _drawn(source: Operators, weights: LayerWeights) -> Operators:
    if isinstance(source, LearnedOperators):
        return source.drawn(weights)
    if isinstance(source, ScaledOperators):
        return ScaledOperators(_drawn(source.source, weights), source.compute, source.sends)
    return source
