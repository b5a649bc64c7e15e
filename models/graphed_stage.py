"""A stage with static buffers, so that its work can be captured as CUDA graphs and replayed.

A decode-only micro-batch is one full graph if the attention backend has plans over static buffers too. All others use
piecewise graphs, split at attention. Attention itself runs eagerly, without padding rows, since its reads depend on the
requests' lengths.

Rows are padded to a few bucket sizes. A padding row computes with stale buffer contents, and writes its key and value
to a slot that no request owns. Layers compute rows independently, so it affects no other row.
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

# Powers of two while GEMMs are bound by reading weights, then multiples of 128 rows, the tile size to which the device
# pads GEMMs anyway. More rows run without graphs: launch overhead is hidden by then.
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 384, MAX_GRAPH_ROWS)


def bucket(num_rows: int) -> int | None:
    """Return the bucket that `num_rows` are padded to. None: it is larger than all `BUCKETS`."""
    place = bisect_left(BUCKETS, num_rows)
    return BUCKETS[place] if place < len(BUCKETS) else None


class GraphedStage:
    """Computes a stage's micro-batches, up to the largest bucket of rows, by captured works over static buffers.

    Per bucket, a stage with L layers has L + 1 pieces. Piece 0 precedes the first layer's attention, piece i is between
    the attention of layers i and i + 1, counted from 1, and piece L follows the last layer's attention. With fixed
    attention plans there is also one work of all layers per bound. Final norm and LM head are not captured: they are
    only a few operators, with a large output.

    Args:
        stage: has its weights loaded, at fixed addresses.
        capture: returns for each work a function that does the same on the device. It may call the works. The largest
            come first.
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
        works: dict[tuple[str, int, int], Work] = {}  # by kind, rows, and index of a piece or bound of the plans
        for rows in reversed(BUCKETS):
            if plans is not None:
                works |= {("all", rows, bound): self._all_layers(rows, plans.of(rows, bound)) for bound in plans.bounds}
            works |= {("piece", rows, place): self._piece(rows, place) for place in range(len(self._layers) + 1)}
        with torch.inference_mode():
            self._works = dict(zip(works, capture(list(works.values())), strict=True))

    def drop(self) -> None:
        """Free the captured graphs. `forward` must not be called afterwards."""
        self._works.clear()

    def _inputs(self, rows: int, plan: object) -> StageInputs:
        """Return the first `rows` rows of the buffers as a micro-batch's inputs."""
        ropes = {kind: (cos[:rows], sin[:rows]) for kind, (cos, sin) in self._ropes.items()}
        contexts = [
            BatchContext(self._slots[group][:rows], ropes.get(rotation(kind)), plan)
            for kind, group in zip(self.stage.kinds, self.stage.groups, strict=True)
        ]
        return StageInputs(rows, self._token_ids[:rows], self._positions[:rows], contexts, contexts[-1])

    def _all_layers(self, rows: int, plan: object) -> Work:
        """Return the work of all layers for `rows` decodes. Like a piece, it allocates nothing that outlives it."""
        inputs, hidden = self._inputs(rows, plan), self._hidden[:rows]

        def all_layers() -> None:
            self._keep(hidden, *self.stage.compute_layers(inputs, None if self.stage.mesh.is_first else hidden))

        return all_layers

    def _piece(self, rows: int, place: int) -> Work:
        """Return piece `place` for `rows` rows. It allocates nothing that outlives it."""
        residual, queries, attended = self._hidden[:rows], self._queries[:rows], self._attended[:rows]
        inputs, cache = self._inputs(rows, plan=None), self.stage.cache

        def piece() -> None:
            hidden = None
            if place > 0:
                own, hidden = self._layers[place - 1].after_attention(attended, residual)
                self._keep(residual, own)
            elif self.stage.mesh.is_first:
                residual.copy_(self.stage.embed(inputs.token_ids, inputs.positions))
            if place < len(self._layers):
                layer, keys, values = self._layers[place], cache.keys[place], cache.values[place]
                layer.before_attention(residual, hidden, inputs.contexts[place], keys, values, queries)
            else:
                self._keep(residual, residual, hidden)

        return piece

    @staticmethod
    def _keep(buffer: Tensor, residual: Tensor, hidden: Tensor | None = None) -> None:
        """Write residual + hidden to a buffer, which may be the residual itself."""
        if residual is not buffer:
            buffer.copy_(residual)
        if hidden is not None:
            buffer.add_(hidden)

    @torch.inference_mode()
    def forward(self, inputs: StageInputs, hidden_TH: Tensor | None = None) -> Tensor:
        """Compute a micro-batch, like `Stage.forward`."""
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
        # Clone, since the next micro-batch may overwrite the buffer while the transport still reads it.
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
