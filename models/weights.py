"""Loads a rank's weights: maps slices of the tensors in a Hugging Face checkpoint to this rank's parameters.

Parameters have Megatron's layouts: QKV rows are interleaved by KV group, and fc1 is [gate; up] of each rank. A rank
reads only its own slices, a few MB at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from ..conf.schema import Architecture
from ..parallel.layers import ReplicatedEmbedding, padded_vocab
from ..parallel.mesh import Mesh
from ..parallel.quantized_matrix import QuantizedMatrix
from .checkpoint import TensorSource
from .decoder import DecoderLayer
from .head_norm import HeadNorm
from .layout import Names, names_of
from .quantization.matrices import converted
from .stage import Stage

_BLOCK_BYTES = 4 << 20


class Layer(Protocol):
    """A layer with a weight, which is either numbers or a quantized matrix."""

    @property
    def weight(self) -> torch.Tensor:
        """The numbers, where they are not quantized."""
        ...

    @property
    def quantized(self) -> QuantizedMatrix | None:
        """The matrix, where it is quantized and not yet packed."""
        ...


@dataclass(frozen=True, slots=True)
class Piece:
    """A slice of a checkpoint's tensor, and the view of a parameter that it is loaded into.

    The target is [G, rows, columns], or [G, rows] for a vector; each tensor of a quantized matrix is such a view. The
    slice has G * rows rows and as many columns. Rows and columns are those of the [out, in] matrix, also where the file
    has it transposed.
    """

    name: str
    target: torch.Tensor | QuantizedMatrix
    row: int = 0  # the first
    column: int = 0  # the first
    transposed: bool = False  # the file has [in, out]

    @property
    def size(self) -> int:
        """The number of bytes or more that it loads."""
        return (self.target if isinstance(self.target, torch.Tensor) else self.target.codes).numel()

    def load(self, source: TensorSource) -> None:
        """Copy the slice block by block, converted to the target's type or format."""
        if isinstance(self.target, torch.Tensor):
            self._load_numbers(source, self.target)
        else:
            self._load_quantized(source, self.target)

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

    def _load_numbers(self, source: TensorSource, target: torch.Tensor) -> None:
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
    """Yield the group, the first row and the last one plus 1 of each block of up to `step` rows."""
    return ((g, first, min(first + step, R)) for g in range(G) for first in range(0, R, step))


def _view(layer: Layer, of: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor | QuantizedMatrix:
    """Return a view of some rows of a layer's weight, which `of` makes of a matrix with these rows."""
    if (own := layer.quantized) is None:
        return of(layer.weight)
    return QuantizedMatrix(own.format, of(own.codes), of(own.scales), None if own.offsets is None else of(own.offsets))


def plan_pieces(stage: Stage) -> Iterator[Piece]:
    """Yield the pieces that together fill this rank's parameters."""
    arch, mesh, names = stage.arch, stage.mesh, names_of(stage.arch)
    if stage.embedding is not None:
        if isinstance(stage.embedding, ReplicatedEmbedding):
            yield Piece(names.embedding, _view(stage.embedding, lambda rows: rows[None]))
        else:
            yield from _vocab_rows(names.embedding, stage.embedding, arch, mesh)
    if stage.position_embedding is not None:
        yield Piece(names.positions, stage.position_embedding[None])
    for i, layer in zip(stage.layers, stage.decoder, strict=True):
        yield from _layer_pieces(layer, names, names.layer.format(i), arch, mesh)  # type: ignore[arg-type]
    if stage.final_norm is not None:
        yield from _norm_pieces(names.final_norm, stage.final_norm)
    if stage.head is not None and not (arch.tie_embeddings and stage.embedding is not None):
        name = names.embedding if arch.tie_embeddings else names.head
        yield from _vocab_rows(name, stage.head, arch, mesh)


def _vocab_rows(name: str, layer: Layer, arch: Architecture, mesh: Mesh) -> Iterator[Piece]:
    """Yield this rank's rows of the vocabulary, and set the rows of its padding to zero."""
    total = padded_vocab(arch.vocab_size, mesh.tp) // mesh.tp
    first = mesh.tp_rank * total
    count = min(arch.vocab_size - first, total)
    padding = _view(layer, lambda rows: rows[max(count, 0) :])
    for tensor in [padding] if isinstance(padding, torch.Tensor) else [padding.codes, padding.scales, padding.offsets]:
        if tensor is not None:
            tensor.zero_()
    if count > 0:
        yield Piece(name, _view(layer, lambda rows: rows[None, :count]), row=first)


def _norm_pieces(name: str, norm: nn.Module) -> Iterator[Piece]:
    for kind, parameter in norm.named_parameters():
        yield Piece(f"{name}.{kind}", parameter[None])


def _layer_pieces(layer: DecoderLayer, names: Names, prefix: str, arch: Architecture, mesh: Mesh) -> Iterator[Piece]:
    K, G, D = arch.num_kv_heads // mesh.tp, arch.num_heads // arch.num_kv_heads, arch.head_dim
    rank, transposed = mesh.tp_rank, names.transposed
    attention, ffn = layer.attention, layer.ffn
    yield from _norm_pieces(prefix + names.attention_norm, layer.attention_norm)
    yield from _norm_pieces(prefix + names.ffn_norm, layer.ffn_norm)
    if isinstance(attention.qk_norm, HeadNorm):
        yield Piece(prefix + names.q_norm, attention.qk_norm.query_weight[None])
        yield Piece(prefix + names.k_norm, attention.qk_norm.key_weight[None])

    heads = (slice(0, G), slice(G, G + 1), slice(G + 1, G + 2))  # of a KV group: queries, key, value
    before: dict[str, int] = {}  # by tensor: rows of the parts before, where one tensor holds q, k and v
    for name, part in zip((names.q, names.k, names.v), heads, strict=True):
        count = part.stop - part.start
        row = before.get(name, 0) + rank * K * count * D
        before[name] = before.get(name, 0) + arch.num_kv_heads * count * D

        def of_part(rows: torch.Tensor, part: slice = part) -> torch.Tensor:
            return rows.view(K, G + 2, D, -1)[:, part].flatten(1, 2)

        yield Piece(f"{prefix}{name}.weight", _view(attention.qkv, of_part), row=row, transposed=transposed)
        if attention.qkv.bias is not None:
            bias = attention.qkv.bias.view(K, G + 2, D)[:, part].view(K, count * D)
            yield Piece(f"{prefix}{name}.bias", bias, row=row)

    F = arch.ffn_size // mesh.tp
    for i, name in enumerate((names.gate, names.up) if arch.gated_ffn else (names.up,)):
        rows = slice(i * F, (i + 1) * F)

        def of_half(matrix: torch.Tensor, rows: slice = rows) -> torch.Tensor:
            return matrix[None, rows]

        weight = _view(ffn.fc1, of_half)
        yield Piece(f"{prefix}{name}.weight", weight, row=rank * F, transposed=transposed)
        if ffn.fc1.bias is not None:
            yield Piece(f"{prefix}{name}.bias", ffn.fc1.bias[None, rows], row=rank * F)

    for name, linear, width in ((names.attention_out, attention.out, K * G * D), (names.down, ffn.fc2, F)):
        weight = _view(linear, lambda matrix: matrix[None])
        yield Piece(f"{prefix}{name}.weight", weight, column=rank * width, transposed=transposed)
        if linear.bias is not None:
            yield Piece(f"{prefix}{name}.bias", linear.bias[None])


def load_stage(stage: Stage, source: TensorSource, on_piece: Callable[[], None] = lambda: None) -> None:
    """Load this rank's parameters. `on_piece` is called before each piece.

    Raises:
        ConfigError: a tensor is missing, has the wrong shape, or is unknown to the architecture.
    """
    pieces = list(plan_pieces(stage))
    source.check(stage.arch, {piece.name for piece in pieces})
    pieces.sort(key=lambda piece: piece.size, reverse=True)  # the largest need the most memory for a block
    for piece in pieces:
        on_piece()
        piece.load(source)
    source.close()
