"""What made compute longer than its tokens need on the same devices, by root, in seconds summed over all stages.

Idle time is what a stage waits; this is what it computes for longer than it would have to. A layer's time for few rows
is mostly that of reading weights, of latencies and of launches, however few the rows are. So each micro-batch is
compared with the seconds a row that large ones reach, by the operators of a cost model, or by those learned of the run.
What a stage really took is split in the same proportion as what its operators foretell. The rest is the work itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median

import numpy as np

from ..core.micro_batch_columns import Floats
from ..core.run_record import MicroBatchRecord, RunRecord
from ..cost.operators import LAYER_LINEARS, Operators
from ..cost.stage_costs import MicroBatchShape, StageCosts
from ..ledger.ledger import Ledger
from .roots import Root

_MOST_MICRO_BATCHES = 600  # that are looked at, evenly over the run
_LARGE = (512, 1024, 2048, 4096)  # rows of micro-batches that count as large
_BEYOND = 4  # times the rows of its largest micro-batch, up to which the times fitted to a run are taken to hold
_LEAST_ROWS = 4  # of a micro-batch of decodes: fewer are a small batch, though no more requests are there
_SHORT = 512  # tokens that attention over counts as a short prompt's
_SPLIT = 0.5  # of the prompt tokens, in prompts of several chunks, from which on chunks bound micro-batches
_PARTS = (Root.SMALL_CHUNK, Root.SMALL_BATCH, Root.PADDING, Root.TENSOR_PARALLEL, Root.LONG_PROMPTS, Root.PREEMPTION)


@dataclass(frozen=True, slots=True)
class KnownCosts:
    """The operators by which a run's compute time is judged.

    Attributes:
        costs: of its stages.
        tile: rows that a product is padded to.
        nodes: over which the ranks of one stage are spread.
        is_learned: whether they were fitted to the run, not those of a cost model; they hold for about its own sizes.
    """

    costs: StageCosts
    tile: int = 1
    nodes: int = 1
    is_learned: bool = False

    def large(self, record: RunRecord) -> tuple[int, ...]:
        """Return numbers of rows of large micro-batches: those by which smaller ones are judged."""
        if not self.is_learned:
            return _LARGE
        most = _BEYOND * max(each.num_tokens for each in record.micro_batches)
        return tuple(rows for rows in _LARGE if rows <= most) or (most,)


Losses = dict[Root, tuple[float, dict[str, float]]]  # seconds, and numbers that show them, by name


def compute_losses(known: KnownCosts, record: RunRecord, ledger: Ledger) -> Losses:
    """Split the compute seconds of a run: what is beyond the work itself, by root."""
    batches = record.micro_batches[:: -(-len(record.micro_batches) // _MOST_MICRO_BATCHES) or 1]
    costs, stages = known.costs, ledger.num_stages
    if not batches or costs.num_stages != stages:
        return {}
    is_split = _split_share(record) >= _SPLIT
    again, large = _computed_again(record), known.large(record)
    kinds: dict[int, _Kind] = {}
    sums, total = np.zeros((stages, len(_PARTS))), np.zeros(stages)
    for each in batches:
        shape = MicroBatchShape.of_record(each)
        seconds = costs.seconds(shape)
        for stage, source in enumerate(costs.operators):
            kind = kinds.get(id(source)) or kinds.setdefault(id(source), _Kind(source, known, large))
            sums[stage] += costs.layers[stage] * kind.losses(each, shape, stages, is_split=is_split)
            sums[stage, -1] += again.get(each.micro_batch, 0) / max(1, shape.rows) * seconds[stage]
        total += seconds
    busy = np.array([ledger.busy_seconds(stage) for stage in range(stages)], np.float64) - ledger.contended
    shares = (sums / np.where(total > 0, total, 1.0)[:, None]).clip(0.0, 1.0)
    found = (busy[:, None] * shares).sum(axis=0).tolist()
    return {
        root: (seconds, _evidence(root, batches, record))
        for root, seconds in zip(_PARTS, found, strict=True)
        if seconds > 0
    }


class _Kind:
    """What a layer on one kind of device takes, by rows."""

    def __init__(self, source: Operators, known: KnownCosts, large: Sequence[int]) -> None:
        self._source = source
        self._tile = known.tile
        self._across = known.nodes > 1
        self._most = large[0]
        self._host = (source.host.step + source.host.prompt) / max(known.costs.layers)
        self._sums = cache(source.all_reduce)
        self._products: Callable[[int], float] = cache(
            lambda rows: sum(source.linear(operator, rows) for operator in LAYER_LINEARS)
        )
        self._a_row = min(self._layer(rows) / rows for rows in large)
        self._a_short_token = source.chunk_attention(_SHORT, 0) / _SHORT

    def _layer(self, rows: int) -> float:
        """Return a layer's seconds of all but attention, with its part of the host; sums between nodes count apart."""
        source = self._source
        sums = 0.0 if self._across else 2 * self._sums(rows)
        return self._products(rows) + source.others(rows) + source.routing(rows) + sums + self._host

    def _padding(self, rows: int) -> float:
        """Return how much longer products take than on the straight line between whole tiles."""
        low = rows - rows % self._tile
        if not low or low == rows:
            return 0.0
        below, above = self._products(low), self._products(low + self._tile)
        return max(0.0, self._products(rows) - below - (above - below) * (rows - low) / self._tile)

    def losses(self, each: MicroBatchRecord, shape: MicroBatchShape, stages: int, *, is_split: bool) -> Floats:
        """Return the seconds of a layer beyond the work of a micro-batch, an entry for each of `_PARTS`."""
        rows, found = max(1, shape.rows), np.zeros(len(_PARTS))
        padding, is_chunk = self._padding(rows), bool(shape.chunks)
        a_row = self._a_row
        if not is_chunk:
            most = min(self._most, max(_LEAST_ROWS, (each.num_running + each.num_waiting) // stages))
            a_row = self._layer(most) / most if rows < most else self._layer(rows) / rows
        root = Root.SMALL_CHUNK if is_chunk and is_split else Root.SMALL_BATCH
        found[_PARTS.index(root)] = max(0.0, self._layer(rows) - rows * a_row - padding)
        found[_PARTS.index(Root.PADDING)] = padding
        found[_PARTS.index(Root.TENSOR_PARALLEL)] = 2 * self._sums(rows) if self._across else 0.0
        attention = sum(
            self._source.chunk_attention(length, prefix) - length * self._a_short_token
            for length, prefix in shape.chunks
        )
        found[_PARTS.index(Root.LONG_PROMPTS)] = max(0.0, attention)
        return found


def _split_share(record: RunRecord) -> float:
    """Return the share of prompt tokens that lie in prompts of several chunks."""
    prompts = {request.request: request.prompt_tokens - request.cached_tokens for request in record.requests}
    chunks = [chunk for each in record.micro_batches for chunk in each.chunks]
    split = sum(chunk.tokens for chunk in chunks if chunk.tokens < prompts.get(chunk.request, 0))
    return split / max(1, sum(chunk.tokens for chunk in chunks))


def _computed_again(record: RunRecord) -> dict[int, int]:
    """Return by micro-batch the prompt tokens that it computed again after their request had been preempted."""
    preempted = {request.request: request.prompt_tokens for request in record.requests if request.preemptions}
    done: dict[int, int] = {}
    again: dict[int, int] = {}
    for each in record.micro_batches if preempted else ():
        for chunk in each.chunks:
            if (prompt := preempted.get(chunk.request)) is not None:
                end = chunk.start + chunk.tokens
                new = max(0, min(end, prompt) - max(chunk.start, done.get(chunk.request, 0)))
                again[each.micro_batch] = again.get(each.micro_batch, 0) + chunk.tokens - new
                done[chunk.request] = max(end, done.get(chunk.request, 0))
    return again


def _evidence(root: Root, batches: Sequence[MicroBatchRecord], record: RunRecord) -> dict[str, float]:
    if root == Root.SMALL_CHUNK:
        return {"tokens": median(each.prefill_tokens for each in batches if each.chunks)}
    if root != Root.SMALL_BATCH:
        return {}
    small = [each for each in batches if not each.chunks] or batches
    names = {"rows": "num_tokens", "running": "num_running", "waiting": "num_waiting", "kv_share": "kv_blocks_used"}
    found = {name: float(median(getattr(each, of) for each in small)) for name, of in names.items()}
    return found | {"kv_share": found["kv_share"] / (record.num_blocks or 1), "batch": record.batch}
