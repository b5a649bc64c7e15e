"""Loads a rank's weights: maps slices of a Hugging Face checkpoint's tensors to this rank's parameters.

Parameters have Megatron's layouts: QKV rows are interleaved by KV group, and fc1 is [gate; up] per rank. A rank reads
only its own shards, a few MB at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..conf.architecture import Architecture
from ..kernels.quantized_matrix import QuantizedMatrix
from ..parallel.layers import Packable, ReplicatedEmbedding, RowParallelLinear, padded_vocab
from ..parallel.mesh import Mesh
from .decoder import Attention, DecoderLayer, FeedForward
from .experts.block import Experts
from .experts.routed import RoutedExperts
from .latent_attention import LatentAttention
from .layout import names_of, norm_places
from .names import Names, weight_of
from .quantization.matrices import converted
from .safetensors_folder import TensorSource
from .stage import Stage

_BLOCK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Piece:
    """A slice of a checkpoint's tensor, and the view of a parameter to load it into.

    The target is [G, rows, columns], or [G, rows] for a vector; for a quantized matrix each of its tensors is such a
    view. The slice has G groups of rows, contiguous or `stride` rows apart, and the same columns. Rows and columns are
    those of the [out, in] matrix, even if the file has it transposed.
    """

    name: str
    target: Tensor | QuantizedMatrix
    row: int = 0  # the first
    column: int = 0  # the first
    transposed: bool = False  # the file has [in, out]
    stride: int = 0  # rows between the starts of two groups; 0: contiguous groups
    order: Tensor | None = None  # permutation of each head's rows for the target; None: as read
    scale: float = 1.0  # the target is the slice times this
    offset: float = 0.0  # plus this

    @property
    def size(self) -> int:
        """The number of elements of the target, or bytes if it is quantized."""
        return self._shape.numel()

    def load(self, source: TensorSource) -> None:
        """Copy the slice block by block, converted to the target's type or format."""
        if self.stride:
            for g in range(self._shape[0]):

                def of_group(rows: Tensor, g: int = g) -> Tensor:
                    return rows[g : g + 1]

                start = self.row + g * self.stride
                replace(self, target=_of(self.target, of_group), row=start, stride=0).load(source)
            return
        if isinstance(self.target, Tensor):
            self._load_numbers(source, self.target)
        else:
            self._load_quantized(source, self.target)
        if self.order is not None:
            _of(self.target, self._reorder)
        if self.scale != 1.0 or self.offset:
            assert isinstance(self.target, Tensor), self.name
            self.target.mul_(self.scale).add_(self.offset)

    def _reorder(self, rows: Tensor) -> Tensor:
        """Permute the rows of each head in place."""
        assert self.order is not None
        D = len(self.order)
        heads = rows.unflatten(1, (-1, D))
        heads.copy_(heads[:, :, self.order])
        return rows

    @property
    def _shape(self) -> torch.Size:
        return (self.target if isinstance(self.target, Tensor) else self.target.codes).shape

    def _load_quantized(self, source: TensorSource, target: QuantizedMatrix) -> None:
        G, R, width = target.codes.shape
        C = width * 8 // target.format.bits
        for g, first, last in _blocks(G, R, max(1, _BLOCK_BYTES // C)):
            start = self.row + g * R
            rows, columns = slice(start + first, start + last), slice(self.column, self.column + C)
            block = converted(source.read_quantized(self.name, rows, columns), target.format)
            target.codes[g, first:last] = block.codes
            target.scales[g, first:last] = block.scales
            if target.offsets is not None:
                assert block.offsets is not None, self.name
                target.offsets[g, first:last] = block.offsets

    def _load_numbers(self, source: TensorSource, target: Tensor) -> None:
        G, R = target.shape[:2]
        if target.dim() == 2:
            target.copy_(source.read(self.name, slice(self.row, self.row + G * R), None).view(G, R))
            return
        C = target.shape[2]
        shape = source.shape(self.name)
        assert shape is not None
        step = max(1, _BLOCK_BYTES // (4 * shape[1]))
        if self.transposed:
            columns = slice(self.row, self.row + G * R)
            for first in range(0, C, step):
                last = min(first + step, C)
                block = source.read(self.name, slice(self.column + first, self.column + last), columns)
                target[:, :, first:last].copy_(block.reshape(-1, G, R).permute(1, 2, 0))
            return
        columns = slice(self.column, self.column + C)
        for g, first, last in _blocks(G, R, step):
            start = self.row + g * R
            target[g, first:last].copy_(source.read(self.name, slice(start + first, start + last), columns))


def _blocks(G: int, R: int, step: int) -> Iterator[tuple[int, int, int]]:
    """Yield the group, the first row and one past the last row of each block of up to `step` rows."""
    return ((g, first, min(first + step, R)) for g in range(G) for first in range(0, R, step))


def _view(layer: Packable, of: Callable[[Tensor], Tensor]) -> Tensor | QuantizedMatrix:
    """Return a view of some rows of a layer's weight, selected by `of`."""
    return _of(layer.weight if layer.quantized is None else layer.quantized, of)


def _of(matrix: Tensor | QuantizedMatrix, view: Callable[[Tensor], Tensor]) -> Tensor | QuantizedMatrix:
    """Return a view of some rows of a matrix, by applying `view` to each of its tensors."""
    if isinstance(matrix, Tensor):
        return view(matrix)
    offsets = None if matrix.offsets is None else view(matrix.offsets)
    return QuantizedMatrix(matrix.format, view(matrix.codes), view(matrix.scales), offsets)


def _alone(matrix: Tensor) -> Tensor:
    """Return the matrix as one group of rows."""
    return matrix[None]


def plan_pieces(stage: Stage) -> Iterator[Piece]:
    """Yield the pieces that together fill this rank's parameters."""
    arch, mesh, names = stage.arch, stage.mesh, names_of(stage.arch)
    if stage.embedding is not None:
        if isinstance(stage.embedding, ReplicatedEmbedding):
            yield Piece(names.embedding, _view(stage.embedding, _alone))
        else:
            yield from _vocab_rows(names.embedding, stage.embedding, arch, mesh)
    if stage.position_embedding is not None:
        yield Piece(names.positions, stage.position_embedding[None])
    for i, layer in zip(stage.layers, stage.decoder, strict=True):
        yield from _layer_pieces(layer, names, names.layer.format(i), arch, mesh)  # type: ignore[arg-type]
    if stage.final_norm is not None:
        yield from _norm_pieces(names.final_norm, stage.final_norm, names.norm_offset)
    if stage.head is not None and not (arch.tie_embeddings and stage.embedding is not None):
        name = names.embedding if arch.tie_embeddings else names.head
        yield from _vocab_rows(name, stage.head, arch, mesh)
    if stage.head_bias is not None:
        yield Piece(names.head_bias, stage.head_bias[None])


def _vocab_rows(name: str, layer: Packable, arch: Architecture, mesh: Mesh) -> Iterator[Piece]:
    """Yield this rank's rows of the vocabulary, and zero its padding rows."""
    total = padded_vocab(arch.vocab_size, mesh.tp) // mesh.tp
    first = mesh.tp_rank * total
    count = min(arch.vocab_size - first, total)
    _view(layer, lambda rows: rows[max(count, 0) :].zero_())
    if count > 0:
        yield Piece(name, _view(layer, lambda rows: rows[None, :count]), row=first)


def _norm_pieces(name: str, norm: nn.Module, offset: float) -> Iterator[Piece]:
    for kind, parameter in norm.named_parameters():
        yield Piece(f"{name}.{kind}", parameter[None], offset=offset if kind == "weight" else 0.0)


def turning_order(arch: Architecture, names: Names) -> Tensor | None:
    """Return the permutation of a head that pairs element i with i + D / 2, with unrotated elements last in each half.

    Kernels rotate whole heads in this layout, unrotated elements by an angle of 0. Attention scores do not change if
    queries and keys are permuted alike. None: the checkpoint already has this order.
    """
    D, turned = arch.head_dim, arch.turned
    if arch.position != "rope" or (turned == D and not names.neighbours_turn):
        return None
    first, second = torch.arange(turned).view(-1, 2).T if names.neighbours_turn else torch.arange(turned).view(2, -1)
    still = torch.arange(turned, D).view(2, -1)
    return torch.cat([first, still[0], second, still[1]])


def _layer_pieces(layer: DecoderLayer, names: Names, prefix: str, arch: Architecture, mesh: Mesh) -> Iterator[Piece]:
    rank, transposed, offset = mesh.tp_rank, names.transposed, names.norm_offset
    attention, ffn = layer.attention, layer.ffn
    for place in norm_places(arch):
        yield from _norm_pieces(prefix + getattr(names, place), getattr(layer, place), offset)
    if isinstance(attention, LatentAttention):
        yield from _latent_pieces(attention, names, prefix, rank)
    else:
        yield from _qkv_pieces(attention, names, prefix, arch, mesh)
    if attention.sinks is not None:
        yield Piece(prefix + names.sinks, attention.sinks[None], row=rank * len(attention.sinks))

    column = rank * (arch.num_heads // mesh.tp) * arch.value_dim
    yield from _row_pieces(prefix + names.attention_out, attention.out, arch, column, transposed)
    if isinstance(ffn, Experts):
        yield from _expert_pieces(ffn, names, prefix, arch, mesh)
    else:
        parts = (names.gate, names.up) if arch.gated_ffn else (names.up,)
        yield from _ffn_pieces(ffn, tuple(prefix + name for name in (*parts, names.down)), arch, rank, transposed)


def _ffn_pieces(
    ffn: FeedForward, names: Sequence[str], arch: Architecture, rank: int, transposed: bool
) -> Iterator[Piece]:
    """Yield the pieces of a feed-forward network with the tensors `names`: fc1 (gate and up if gated), then fc2."""
    *parts, down = names
    F = ffn.size // ffn.tp
    before: dict[str, int] = {}  # by tensor: rows of preceding parts, if one tensor contains gate and up
    for i, name in enumerate(parts):
        rows, row = slice(i * F, (i + 1) * F), before.get(name, 0) + rank * F
        before[name] = before.get(name, 0) + F * ffn.tp

        def of_half(matrix: Tensor, rows: slice = rows) -> Tensor:
            return matrix[None, rows]

        yield Piece(f"{name}.weight", _view(ffn.fc1, of_half), row=row, transposed=transposed)
        if ffn.fc1.bias is not None:
            yield Piece(f"{name}.bias", ffn.fc1.bias[None, rows], row=row)
    yield from _row_pieces(down, ffn.fc2, arch, rank * F, transposed)


def _row_pieces(
    name: str, linear: RowParallelLinear, arch: Architecture, column: int, transposed: bool
) -> Iterator[Piece]:
    """Yield this rank's columns of a row-parallel weight, starting at `column`, and its bias."""
    weight = _view(linear, _alone)
    yield Piece(f"{name}.weight", weight, column=column, transposed=transposed)
    if linear.bias is not None:
        yield Piece(f"{name}.bias", linear.bias[None], scale=arch.residual_scale)


def _expert_pieces(ffn: Experts, names: Names, prefix: str, arch: Architecture, mesh: Mesh) -> Iterator[Piece]:
    """Yield the pieces of the router, of this rank's experts or shards of experts, and of the shared expert."""
    router, routed = ffn.router, ffn.routed
    yield Piece(f"{prefix}{names.router}.weight", router.weight[None])
    if router.bias is not None:
        yield Piece(f"{prefix}{names.router}.bias", router.bias[None])
    if router.correction is not None:
        yield Piece(prefix + names.correction, router.correction[None])
    F = routed.width
    first = 0 if arch.expert_size == F else mesh.tp_rank * F  # first row of each expert
    if names.fused_experts:
        yield from _fused_pieces(routed, prefix + names.fused_experts, first)
    for e in range(0 if names.fused_experts else routed.count):
        own, (gate_up, down) = names.of_expert(routed.first + e), routed.weights(e)
        for i, name in enumerate(own[:2]):

            def of_half(matrix: Tensor, i: int = i) -> Tensor:
                return matrix[None, i * F : (i + 1) * F]

            before = i * arch.expert_size if own[0] == own[1] else 0  # rows of the gate, if fused with up
            yield Piece(prefix + weight_of(name), _of(gate_up, of_half), row=before + first)
        yield Piece(prefix + weight_of(own[2]), _of(down, _alone), column=first)
    if ffn.shared is not None:
        assert isinstance(ffn.shared, FeedForward)
        shared = tuple(prefix + name for name in names.of_shared)
        yield from _ffn_pieces(ffn.shared, shared, arch, mesh.tp_rank, names.transposed)
    if ffn.shared_gate is not None:
        yield Piece(prefix + names.shared_gate, ffn.shared_gate[None])


def _fused_pieces(routed: RoutedExperts, prefix: str, first: int) -> Iterator[Piece]:
    """Yield this rank's experts from tensors of all experts, with interleaved gate and up columns.

    `first` is this rank's first gate row of each expert.
    """
    assert routed.gate_up_bias is not None
    assert routed.down_bias is not None
    order = torch.arange(2 * routed.width).view(-1, 2).T.flatten()
    for i in range(routed.count):
        e, own, name = routed.first + i, slice(i, i + 1), f"{prefix}gate_up_proj"
        gate_up, down = (_of(matrix, _alone) for matrix in routed.weights(i))
        yield Piece(f"{name}[{e}]", gate_up, row=2 * first, transposed=True, order=order)
        yield Piece(f"{name}_bias[{e}]", routed.gate_up_bias[own], row=2 * first, order=order)
        yield Piece(f"{prefix}down_proj[{e}]", down, column=first, transposed=True)
        yield Piece(f"{prefix}down_proj_bias[{e}]", routed.down_bias[own])


def _qkv_pieces(attention: Attention, names: Names, prefix: str, arch: Architecture, mesh: Mesh) -> Iterator[Piece]:
    """Yield the rows of each KV group's queries, keys and values, and the norms of queries and keys."""
    K, G, D = arch.num_kv_heads // mesh.tp, arch.num_heads // arch.num_kv_heads, arch.head_dim
    rank, order = mesh.tp_rank, turning_order(arch, names)
    before: dict[str, int] = {}  # by tensor: rows of preceding parts, if one tensor contains q, k and v
    heads = (slice(0, G), slice(G, G + 1), slice(G + 1, G + 2))  # of a KV group: queries, key, value
    for name, part in zip((names.q, names.k, names.v), heads, strict=True):
        count, own = part.stop - part.start, order if part.start <= G else None
        if names.grouped:
            row, stride = (rank * K * (G + 2) + part.start) * D, (G + 2) * D
        else:
            row, stride = before.get(name, 0) + rank * K * count * D, 0
            before[name] = before.get(name, 0) + arch.num_kv_heads * count * D

        def of_part(rows: Tensor, part: slice = part) -> Tensor:
            return rows.view(K, G + 2, D, -1)[:, part].flatten(1, 2)

        weight = _view(attention.qkv, of_part)
        yield Piece(f"{prefix}{name}.weight", weight, row=row, transposed=names.transposed, stride=stride, order=own)
        if attention.qkv.bias is not None:
            bias = attention.qkv.bias.view(K, G + 2, D)[:, part].view(K, count * D)
            yield Piece(f"{prefix}{name}.bias", bias, row=row, stride=stride, order=own)
    if attention.qk_norm is not None:
        for name, weight in (
            (names.q_norm, attention.qk_norm.query_weight),
            (names.k_norm, attention.qk_norm.key_weight),
        ):
            row = rank * len(weight) if arch.qk_norm_over == "width" else 0
            yield Piece(prefix + name, weight[None], row=row, order=order, offset=names.norm_offset)


def _latent_pieces(attention: LatentAttention, names: Names, prefix: str, rank: int) -> Iterator[Piece]:
    """Yield MLA's down-projections and queries, and this rank's heads of the up-projections."""
    own, latent, width = names.latent, attention.latent, attention.query_rank

    def order(still: int) -> Tensor | None:
        """Return the permutation that keeps `still` elements, and pairs rotary elements by halves."""
        if not latent.neighbours_turn:
            return None
        return torch.cat([torch.arange(still), still + torch.arange(latent.rotary_dim).view(-1, 2).T.flatten()])

    down, query = attention.down, attention.query.weight
    parts = [(own.down, slice(width, None), order(latent.rank))]
    if attention.query_norm is not None:
        parts.append((own.query_down, slice(width), None))
        yield Piece(prefix + own.query_norm, attention.query_norm.weight[None])
    for name, rows, turned in parts:
        yield Piece(f"{prefix}{name}.weight", down.weight[None, rows], order=turned)
        if down.bias is not None:
            yield Piece(f"{prefix}{name}.bias", down.bias[None, rows], order=turned)
    name = own.query_up if width else own.query
    yield Piece(f"{prefix}{name}.weight", query[None], row=rank * len(query), order=order(latent.head_dim))
    yield Piece(prefix + own.norm, attention.norm.weight[None])
    row, stride = 0, latent.head_dim + latent.value_dim  # per head: key rows, then value rows
    for up in (attention.up_key, attention.up_value):
        yield Piece(f"{prefix}{own.up}.weight", up, row=rank * len(up) * stride + row, stride=stride)
        row += up.shape[1]


def load_stage(stage: Stage, source: TensorSource, on_piece: Callable[[], None] = lambda: None) -> None:
    """Load this rank's parameters. `on_piece` is called before each piece.

    Raises:
        ConfigError: a tensor is missing, has the wrong shape, or is unknown to the architecture.
    """
    pieces = list(plan_pieces(stage))
    source.check(stage.arch, {piece.name for piece in pieces})
    pieces.sort(key=lambda piece: piece.size, reverse=True)  # largest first: they need the most memory per block
    for piece in pieces:
        on_piece()
        piece.load(source)
    source.close()
