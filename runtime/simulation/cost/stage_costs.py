"""A stage's time for a micro-batch, composed of its operators' times."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

from collections.abc import Sequence

from mypy_extensions import mypyc_attr

from ...core.columns import entries, total
from ...core.messages import MicroBatchMessage
from ...core.run_record import MicroBatchRecord
from ...core.stage_floor import LastLayer
from .operators import LAYER_LINEARS, HostTimes, Linear, Operators

_AFTER_KEYS: tuple[Linear, ...] = LAYER_LINEARS[1:]  # a layer's GEMMs after the QKV projection
# Share of `others` in the first norm, the rotary embedding and the KV-cache writes, which run on all rows. By bytes
# moved it is 0.20 for LLaMA-2 70B, 0.27 for GPT-3 and 0.38 for LLaMA 13B.
_OTHERS_OF_KEYS = 0.3


class MicroBatchShape:
    """The sizes of a micro-batch on which a stage's time depends.

    `chunks`: (length, prefix) of each; `decodes`: their number; `context`: sum of the KV tokens that each decode
    attends to; `sampled`: number of rows whose logits are computed; `ended`: sum of the KV tokens that the sampled rows
    of chunks attend to, each at the end of its chunk. If `ended` is None, the first chunks are assumed to sample.
    """

    __slots__ = ("chunks", "context", "decodes", "ended", "sampled")

    def __init__(
        self,
        chunks: Sequence[tuple[int, int]] = (),
        decodes: int = 0,
        context: int = 0,
        sampled: int = 0,
        ended: int | None = None,
    ) -> None:
        self.chunks = tuple(chunks)
        self.decodes = decodes
        self.context = context
        self.sampled = sampled
        if ended is None:
            ended = 0
            for length, prefix in self.chunks[: max(0, sampled - decodes)]:
                ended += length + prefix
        self.ended = ended

    @classmethod
    def of(cls, micro_batch: MicroBatchMessage) -> MicroBatchShape:
        """Return the shape of a micro-batch message."""
        starts: bytes = micro_batch.decodes.starts
        count = sampled = entries(starts)
        ended = 0
        chunks: list[tuple[int, int]] = []
        for chunk in micro_batch.chunks:
            length = len(chunk.tokens)
            chunks.append((length, chunk.start))
            if chunk.sample:
                sampled += 1
                ended += length + chunk.start
        return MicroBatchShape(chunks, count, total(starts) + count, sampled, ended)

    @classmethod
    def of_record(cls, micro_batch: MicroBatchRecord, ended: int | None = None) -> MicroBatchShape:
        """Return the shape of a recorded micro-batch; for `ended`, see the class."""
        chunks = [(chunk.tokens, chunk.start) for chunk in micro_batch.chunks]
        decodes = micro_batch.decodes
        return MicroBatchShape(chunks, len(decodes), decodes.context, micro_batch.sampled_rows, ended)

    @property
    def rows(self) -> int:
        """Number of tokens; each linear operator runs once over all of them."""
        rows = self.decodes
        for length, _ in self.chunks:
            rows += length
        return rows


@mypyc_attr(allow_interpreted_subclasses=True)
class StageCosts:
    """Predicts the seconds of each stage for a micro-batch.

    A stage's time is the sum over its layers of the linear operators over all rows, attention (separately for chunks
    and decodes), two all-reduces, others, and MoE routing. It is at least the host's launch time; the rest of the host
    time is added. The first stage adds the embedding, the last one the LM head over the sampled rows. The last layer of
    the last stage computes keys and values for all rows, but attention and feed-forward only for sampled rows, each as
    one query over its whole context, like a decode.

    Args:
        layers: number of decoder layers of each stage.
        operators: operator times of each stage, as stages may run on different devices.
        host: whether host time counts; else it is assumed to overlap fully with the device.
        last_layer: rows for which the last layer computes attention and feed-forward: `sampled` or `all`.
        scale: factor on every stage time.
    """

    def __init__(
        self,
        layers: Sequence[int],
        operators: Sequence[Operators],
        *,
        host: bool = True,
        last_layer: LastLayer = "sampled",
        scale: float = 1.0,
    ) -> None:
        assert len(layers) == len(operators) >= 1
        self.layers = tuple(layers)
        self.operators = tuple(operators)
        self._kinds: list[tuple[Operators, dict[int, float]]] = []  # distinct ones, with layer times by rows
        index: dict[int, int] = {}
        for source in operators:
            if id(source) not in index:
                index[id(source)] = len(self._kinds)
                self._kinds.append((source, {}))
        self._kind = [index[id(source)] for source in operators]
        self.last_layer = last_layer
        self.scale = scale
        self._counts_host = host
        self._skips = last_layer == "sampled"
        hosts = [source.host if host else HostTimes() for source in operators]
        self._host_steps = [each.step for each in hosts]
        self._host_row = hosts[-1].row
        self._host_steps_with_prompts = [each.step + each.prompt for each in hosts]
        self._several = [each.several * count for each, count in zip(hosts, layers, strict=True)]
        self._has_several = any(self._several)
        self._launches = [each.floor + each.layer * count for each, count in zip(hosts, layers, strict=True)]
        self.stretches = tuple([each.stretch for each in hosts])  # of each stage: slowdown of its kernels
        self._by_rows: dict[int, list[float]] = {}  # of each stage, without attention and head
        self._embedding: dict[int, float] = {}
        self._head: dict[int, float] = {}
        self._of_keys: dict[int, float] = {}  # by rows: the last layer's seconds for all rows
        self._after_keys: dict[int, float] = {}  # by sampled rows: its other seconds, without attention

    def scaled(self, scale: float) -> StageCosts:
        """Return the same stages with `scale` as the factor on their times."""
        return StageCosts(self.layers, self.operators, host=self._counts_host, last_layer=self.last_layer, scale=scale)

    def with_operators(self, operators: Sequence[Operators]) -> StageCosts:
        """Return the same stages with other operators, one per stage."""
        return StageCosts(self.layers, operators, host=self._counts_host, last_layer=self.last_layer, scale=self.scale)

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.layers)

    @property
    def whole_layers(self) -> tuple[int, ...]:
        """Number of layers of each stage that compute all rows of every micro-batch."""
        return (*self.layers[:-1], self.layers[-1] - 1) if self._skips else self.layers

    def seconds(self, shape: MicroBatchShape) -> list[float]:
        """Return the seconds of each stage."""
        rows, kinds = shape.rows, self._kinds
        times = self._by_rows.get(rows) or self._without_attention(rows)
        each = [_attention(source, shape) for source, _ in kinds]
        times = [times[stage] + count * each[self._kind[stage]] for stage, count in enumerate(self.layers)]
        if shape.sampled:
            head = self._head.get(shape.sampled)
            if head is None:
                head = self._head[shape.sampled] = self.operators[-1].linear("head", shape.sampled)
            times[-1] += head
        if self._skips and shape.sampled < rows:
            times[-1] -= self._skipped(shape, rows, each[self._kind[-1]])
        if self._has_several and shape.decodes > 1:
            times = [seconds + more for seconds, more in zip(times, self._several, strict=True)]
        return self._with_host(times, shape.sampled, bool(shape.chunks))

    def _with_host(self, times: list[float], sampled: int, has_chunks: bool) -> list[float]:
        """Add host times to device times: launches overlap with the device, the rest does not."""
        host_steps = self._host_steps_with_prompts if has_chunks else self._host_steps
        for stage, launch in enumerate(self._launches):
            seconds = times[stage] * self.stretches[stage]
            times[stage] = (seconds if seconds > launch else launch) + host_steps[stage]
        times[-1] += self._host_row * sampled
        if self.scale != 1.0:
            times = [self.scale * seconds for seconds in times]
        return times

    def _skipped(self, shape: MicroBatchShape, rows: int, attention: float) -> float:
        """Return the seconds that the last layer saves by computing only sampled rows.

        `attention` is its attention time for all rows.
        """
        source, by_rows = self._kinds[self._kind[-1]]
        of_keys = self._of_keys.get(rows)
        if of_keys is None:
            of_keys = source.linear("preproj", rows) + _OTHERS_OF_KEYS * source.others(rows)
            self._of_keys[rows] = of_keys
        seconds = self._layer(source, by_rows, rows) - of_keys + attention
        sampled = shape.sampled
        if sampled:
            after = self._after_keys.get(sampled)
            if after is None:
                after = sum(source.linear(name, sampled) for name in _AFTER_KEYS)
                after += (1 - _OTHERS_OF_KEYS) * source.others(sampled) + 2 * source.all_reduce(sampled)
                after += source.routing(sampled)
                self._after_keys[sampled] = after
            seconds -= after + min(attention, _sampled_attention(source, shape))
        return seconds

    def _without_attention(self, rows: int) -> list[float]:
        """Return the seconds of each stage's device for `rows` tokens, without attention and the LM head."""
        layer = [self._layer(source, by_rows, rows) for source, by_rows in self._kinds]
        times = [count * layer[kind] for count, kind in zip(self.layers, self._kind, strict=True)]
        first = self._embedding.get(rows)
        if first is None:
            first = self._embedding[rows] = self.operators[0].embedding(rows)
        times[0] += first
        self._by_rows[rows] = times
        return times

    def breakdown(self, shape: MicroBatchShape, stage: int) -> dict[str, float]:
        """Return the seconds of one stage by operator, which add up to its time."""
        source, count, rows = self.operators[stage], self.layers[stage], shape.rows
        parts: dict[str, float] = {name: count * source.linear(name, rows) for name in LAYER_LINEARS}
        parts["attn"] = count * _attention(source, shape)
        parts["others"] = count * source.others(rows)
        parts["routing"] = count * source.routing(rows)
        parts["all_reduce"] = count * 2 * source.all_reduce(rows)
        parts["embedding"] = source.embedding(rows) if stage == 0 else 0.0
        head = stage == self.num_stages - 1 and shape.sampled > 0
        parts["head"] = source.linear("head", shape.sampled) if head else 0.0
        if self._skips and stage == self.num_stages - 1 and shape.sampled < rows:
            self._skip(parts, source, shape)
        parts = {name: self.scale * seconds for name, seconds in parts.items()}
        parts["host"] = max(0.0, self.seconds(shape)[stage] - sum(parts.values()))
        return parts

    def _skip(self, parts: dict[str, float], source: Operators, shape: MicroBatchShape) -> None:
        """Subtract from `parts` what the last layer saves by computing only sampled rows."""
        rows, sampled, attention = shape.rows, shape.sampled, _attention(source, shape)
        for name in _AFTER_KEYS:
            parts[name] -= source.linear(name, rows) - (source.linear(name, sampled) if sampled else 0.0)
        parts["attn"] -= attention - (min(attention, _sampled_attention(source, shape)) if sampled else 0.0)
        others = source.others(rows) - (source.others(sampled) if sampled else 0.0)
        parts["others"] -= (1 - _OTHERS_OF_KEYS) * others
        parts["routing"] -= source.routing(rows) - (source.routing(sampled) if sampled else 0.0)
        parts["all_reduce"] -= 2 * (source.all_reduce(rows) - (source.all_reduce(sampled) if sampled else 0.0))

    def _layer(self, source: Operators, by_rows: dict[int, float], rows: int) -> float:
        seconds = by_rows.get(rows)
        if seconds is None:
            seconds = sum(source.linear(name, rows) for name in LAYER_LINEARS)
            seconds += source.others(rows) + source.routing(rows) + 2 * source.all_reduce(rows)
            by_rows[rows] = seconds
        return seconds


def _attention(source: Operators, shape: MicroBatchShape) -> float:
    seconds = source.decode_attention(shape.decodes, shape.context) if shape.decodes else 0.0
    chunks = shape.chunks
    if len(chunks) == 1:
        seconds += source.chunk_attention(*chunks[0])
    elif chunks:
        seconds += source.chunks_attention(chunks)
    return seconds


def _sampled_attention(source: Operators, shape: MicroBatchShape) -> float:
    """Return the attention seconds of the sampled rows alone: each is one query over its whole context."""
    return source.decode_attention(shape.sampled, shape.context + shape.ended)
