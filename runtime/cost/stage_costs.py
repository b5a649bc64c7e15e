"""A stage's time for a micro-batch, composed of its operators' times."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

from collections.abc import Sequence

from mypy_extensions import mypyc_attr

from ..core.columns import entries, total
from ..core.messages import MicroBatchMessage
from .operators import LAYER_LINEARS, Operators


class MicroBatchShape:
    """The sizes of a micro-batch on which a stage's time depends.

    `chunks`: (length, prefix) of each; `decodes`: their number; `context`: sum of the KV tokens that each decode
    attends to; `sampled`: number of rows whose logits are computed.
    """

    __slots__ = ("chunks", "context", "decodes", "sampled")

    def __init__(
        self, chunks: Sequence[tuple[int, int]] = (), decodes: int = 0, context: int = 0, sampled: int = 0
    ) -> None:
        self.chunks = tuple(chunks)
        self.decodes = decodes
        self.context = context
        self.sampled = sampled

    @classmethod
    def of(cls, micro_batch: MicroBatchMessage) -> MicroBatchShape:
        starts: bytes = micro_batch.decodes.starts
        count = sampled = entries(starts)
        chunks: list[tuple[int, int]] = []
        for chunk in micro_batch.chunks:
            chunks.append((len(chunk.tokens), chunk.start))
            sampled += chunk.sample
        return MicroBatchShape(chunks, count, total(starts) + count, sampled)

    @property
    def rows(self) -> int:
        """Number of tokens, over which the linear layers run fused."""
        rows = self.decodes
        for length, _ in self.chunks:
            rows += length
        return rows


@mypyc_attr(allow_interpreted_subclasses=True)
class StageCosts:
    """Predicts the seconds of each stage for a micro-batch.

    A stage's time is the sum over its layers of linear operators over all rows, attention apart for chunks and for
    decodes, two all-reduces, others and host overhead. The first stage adds the embedding, the last one the LM head
    over the rows that sample.

    Args:
        layers: number of decoder layers of each stage.
        operators: operator times of each stage, as stages may run on different devices.
        host: whether the host's overhead counts; else it is assumed to be hidden behind the device.
    """

    def __init__(self, layers: Sequence[int], operators: Sequence[Operators], *, host: bool = True) -> None:
        assert len(layers) == len(operators) >= 1
        self.layers = tuple(layers)
        self.operators = tuple(operators)
        self._kinds: list[tuple[Operators, dict[int, float]]] = []  # the distinct ones, each with its times by rows
        index: dict[int, int] = {}
        for source in operators:
            if id(source) not in index:
                index[id(source)] = len(self._kinds)
                self._kinds.append((source, {}))
        self._kind = [index[id(source)] for source in operators]
        self._host = host
        self._overhead = [source.micro_batch_overhead if host else 0.0 for source in operators]
        self._by_rows: dict[int, list[float]] = {}  # of each stage, without attention and head
        self._embedding: dict[int, float] = {}
        self._head: dict[int, float] = {}

    @property
    def num_stages(self) -> int:
        return len(self.layers)

    def seconds(self, shape: MicroBatchShape) -> list[float]:
        """Seconds of each stage."""
        rows, kinds = shape.rows, self._kinds
        times = self._by_rows.get(rows) or self._without_attention(rows)
        each = [_attention(source, shape) for source, _ in kinds]
        times = [times[stage] + count * each[self._kind[stage]] for stage, count in enumerate(self.layers)]
        if shape.sampled:
            head = self._head.get(shape.sampled)
            if head is None:
                head = self._head[shape.sampled] = self.operators[-1].linear("head", shape.sampled)
            times[-1] += head
        return times

    def _without_attention(self, rows: int) -> list[float]:
        """Seconds of each stage for `rows` tokens, without attention and the LM head."""
        layer = [self._layer(source, by_rows, rows) for source, by_rows in self._kinds]
        times = [
            count * layer[kind] + overhead
            for count, kind, overhead in zip(self.layers, self._kind, self._overhead, strict=True)
        ]
        first = self._embedding.get(rows)
        if first is None:
            first = self._embedding[rows] = self.operators[0].embedding(rows)
        times[0] += first
        self._by_rows[rows] = times
        return times

    def breakdown(self, shape: MicroBatchShape, stage: int) -> dict[str, float]:
        """Seconds of one stage by operator, which add up to its time."""
        source, count, rows = self.operators[stage], self.layers[stage], shape.rows
        parts: dict[str, float] = {name: count * source.linear(name, rows) for name in LAYER_LINEARS}
        parts["attn"] = count * _attention(source, shape)
        parts["others"] = count * source.others(rows)
        parts["all_reduce"] = count * 2 * source.all_reduce(rows)
        parts["embedding"] = source.embedding(rows) if stage == 0 else 0.0
        head = stage == self.num_stages - 1 and shape.sampled > 0
        parts["head"] = source.linear("head", shape.sampled) if head else 0.0
        parts["host"] = (count * source.layer_overhead + source.micro_batch_overhead) if self._host else 0.0
        return parts

    def _layer(self, source: Operators, by_rows: dict[int, float], rows: int) -> float:
        seconds = by_rows.get(rows)
        if seconds is None:
            seconds = sum(source.linear(name, rows) for name in LAYER_LINEARS)
            seconds += source.others(rows) + 2 * source.all_reduce(rows)
            seconds += source.layer_overhead if self._host else 0.0
            by_rows[rows] = seconds
        return seconds


def _attention(source: Operators, shape: MicroBatchShape) -> float:
    seconds = source.decode_attention(shape.decodes, shape.context) if shape.decodes else 0.0
    for length, prefix in shape.chunks:
        seconds += source.chunk_attention(length, prefix)
    return seconds
