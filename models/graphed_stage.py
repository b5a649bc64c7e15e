"""A stage over buffers that stay where they are, so that its work can be captured as CUDA graphs and replayed.

A micro-batch of decodes alone is one graph where the attention backend has plans over such buffers too. Any other is
cut at attention: each piece between is a graph, and attention itself runs as it does without graphs, on the rows that
are there, since what it reads varies with each request's length.

Rows are padded to a few numbers of them. A padding row computes with what the buffers held before, and writes its key
and value to a slot that no request owns. Layers compute row by row, so it reaches no other row.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..conf.architecture import LayerKind
from .attention.flash import FixedFlashPlans
from .batch_context import BatchContext
from .decoder import DecoderLayer
from .stage import Stage, StageInputs, rotation
from .work_memory import MAX_GRAPH_ROWS

Work = Callable[[], None]

# Powers of two while a product's time is that of reading its weights, then tiles of 128 rows, to which the device pads
# its products anyway. A stage computes more rows without graphs: the host is ahead of the device by then.
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 384, MAX_GRAPH_ROWS)


def bucket(num_rows: int) -> int | None:
    """Return the number of rows, of `BUCKETS`, that `num_rows` are padded to. None: there is none as large."""
    place = bisect_left(BUCKETS, num_rows)
    return BUCKETS[place] if place < len(BUCKETS) else None


class GraphedStage:
    """Computes the micro-batches of a stage, up to the largest bucket of rows, by works over fixed buffers.

    For each bucket a stage with L layers has L + 1 pieces. Piece 0 is what precedes the first layer's attention, piece
    i what lies between that of layers i and i + 1, counted from 1, and piece L what follows the last layer's. With
    plans over buffers it has a work of all layers too, for each of their bounds. Final norm and LM head stay outside:
    their output is large, and they are a few operators alone.

    Args:
        stage: has its weights, which must stay where they are.
        capture: returns, for each work, a function that does on the device what the work does. It may call works.
            The largest come first.
    """

    def __init__(self, stage: Stage, capture: Callable[[Sequence[Work]], Sequence[Work]]) -> None:
        self.stage = stage
        self._layers: list[DecoderLayer] = list(stage.decoder)  # type: ignore[arg-type]
        arch, tp, N, device, dtype = stage.arch, stage.mesh.tp, BUCKETS[-1], stage.device, stage.dtype
        heads, K, D = arch.num_heads // tp, arch.num_kv_heads // tp, arch.head_dim
        self._token_ids = torch.zeros(N, dtype=torch.int64, device=device)
        self._positions = torch.zeros(N, dtype=torch.int64, device=device)
        self._slots = {
            group: torch.full((N,), stage.cache.scratch_slot, dtype=torch.int64, device=device)
            for group in dict.fromkeys(stage.groups)
        }
        self._ropes: dict[LayerKind | None, tuple[Tensor, Tensor]] = {
            kind: tuple(torch.zeros(N, 1, 1, D // 2, dtype=dtype, device=device) for _ in range(2))  # type: ignore[misc]
            for kind in stage.ropes
        }
        self._hidden = torch.zeros(N, arch.hidden_size, dtype=dtype, device=device)  # between layers
        self._queries = torch.zeros(N, K, heads // K, D, dtype=dtype, device=device)  # of the next attention
        self._attended = torch.zeros(N, heads * D, dtype=dtype, device=device)  # its output
        num_slots, block_size = stage.cache.scratch_slot, stage.cache.block_size
        plans = None
        if len(stage.attentions) == len(self._slots) == 1:
            plans = stage.attention.fixed_plans(N, min(arch.max_position, num_slots), num_slots // block_size)
        self._plans: FixedFlashPlans | None = plans
        works: dict[tuple[str, int, int], Work] = {}  # by rows, and by place of a piece, or by bound of the plans
        for rows in reversed(BUCKETS):
            if plans is not None:
                works |= {("all", rows, bound): self._all_layers(rows, plans.of(rows, bound)) for bound in plans.bounds}
            works |= {("piece", rows, place): self._piece(rows, place) for place in range(len(self._layers) + 1)}
        with torch.inference_mode():
            self._works = dict(zip(works, capture(list(works.values())), strict=True))

    def drop(self) -> None:
        """Drop what was captured. Nothing can be computed any more."""
        self._works.clear()

    def _inputs(self, rows: int, plan: object) -> StageInputs:
        """Return the buffers of `rows` rows as the inputs of a micro-batch."""
        ropes = {kind: (cos[:rows], sin[:rows]) for kind, (cos, sin) in self._ropes.items()}
        contexts = [
            BatchContext(self._slots[group][:rows], ropes.get(rotation(kind)), plan)
            for kind, group in zip(self.stage.kinds, self.stage.groups, strict=True)
        ]
        return StageInputs(rows, self._token_ids[:rows], self._positions[:rows], contexts, contexts[-1])

    def _all_layers(self, rows: int, plan: object) -> Work:
        """Return the work of all layers for `rows` decodes. As a piece, it leaves nothing but the buffers."""
        inputs, hidden = self._inputs(rows, plan), self._hidden[:rows]

        def all_layers() -> None:
            self._keep(hidden, *self.stage.compute_layers(inputs, None if self.stage.mesh.is_first else hidden))

        return all_layers

    def _piece(self, rows: int, place: int) -> Work:
        """Return piece `place` for `rows` rows. What it allocates it frees: only the buffers outlive it."""
        hidden, queries, attended = self._hidden[:rows], self._queries[:rows], self._attended[:rows]
        inputs, cache = self._inputs(rows, plan=None), self.stage.cache

        def piece() -> None:
            added = None
            if place > 0:
                x, added = self._layers[place - 1].after_attention(attended, hidden)
                self._keep(hidden, x)
            elif self.stage.mesh.is_first:
                hidden.copy_(self.stage.embed(inputs.token_ids, inputs.positions))
            if place < len(self._layers):
                layer, keys, values = self._layers[place], cache.keys[place], cache.values[place]
                layer.before_attention((hidden, added), inputs.contexts[place], keys, values, queries)
            else:
                self._keep(hidden, hidden, added)

        return piece

    @staticmethod
    def _keep(hidden: Tensor, x: Tensor, added: Tensor | None = None) -> None:
        """Write x + added to the buffer `hidden`, which x may be."""
        if x is not hidden:
            hidden.copy_(x)
        if added is not None:
            hidden.add_(added)

    @torch.inference_mode()
    def forward(self, inputs: StageInputs, hidden_TH: Tensor | None = None) -> Tensor:
        """Compute a micro-batch as `Stage.forward` does."""
        T, rows = inputs.num_tokens, bucket(inputs.num_tokens)
        if rows is None:
            out: Tensor = self.stage(inputs, hidden_TH)
            return out
        self._load(inputs, hidden_TH, rows)
        bound = None
        if self._plans is not None and inputs.last_context is inputs.contexts[-1]:  # the last layer computes all rows
            bound = self._plans.load(inputs.last_context.plan, rows)
        if bound is not None:
            self._works["all", rows, bound]()
        else:
            T = self._run_pieces(inputs, rows)
        # The next micro-batch writes to the buffer while the transport may still read what is returned.
        return self.stage.finish(self._hidden[:T] if self.stage.mesh.is_last else self._hidden[:T].clone())

    def _run_pieces(self, inputs: StageInputs, rows: int) -> int:
        """Run the pieces, and attention between them. Returns how many rows the last layer computed."""
        T = inputs.num_tokens
        self._works["piece", rows, 0]()
        cache, contexts = self.stage.cache, [*inputs.contexts[:-1], inputs.last_context]
        for i, (layer, context, keys, values) in enumerate(
            zip(self._layers, contexts, cache.keys, cache.values, strict=True)
        ):
            queries = self._queries[:T]
            if context.rows is not None:
                T = len(context.rows)
                if context.is_empty:
                    break
                last_rows = bucket(T)
                assert last_rows is not None
                rows = last_rows
                self._hidden[:T].copy_(self._hidden.index_select(0, context.rows))
            self._attended[:T].copy_(layer.attention.attend(queries, context, keys, values))
            self._works["piece", rows, i + 1]()
        return T

    def _load(self, inputs: StageInputs, hidden_TH: Tensor | None, rows: int) -> None:
        """Copy a micro-batch's inputs to the buffers."""
        T = inputs.num_tokens
        if hidden_TH is not None:
            self._hidden[:T].copy_(hidden_TH)
        else:
            assert inputs.token_ids is not None
            self._token_ids[:T].copy_(inputs.token_ids)
            self._positions[:T].copy_(inputs.positions)
        of_group = dict(zip(self.stage.groups, inputs.contexts, strict=True))
        for group, slots in self._slots.items():
            slots[:T].copy_(of_group[group].slots)
            slots[T:rows].fill_(self.stage.cache.scratch_slot)
        given = {rotation(kind): context.rope for kind, context in zip(self.stage.kinds, inputs.contexts, strict=True)}
        for kind, buffers in self._ropes.items():
            for buffer, own in zip(buffers, given[kind] or (), strict=True):
                buffer[:T].copy_(own)
