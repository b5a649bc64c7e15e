"""Which slice of which tensor a rank holds: from Hugging Face names and layouts to this rank's parameters.

Parameters keep Megatron's layouts: QKV rows interleaved by KV group, fc1 = [gate; up] of each rank. A rank reads only
its own slices, a few MB at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..conf.errors import ConfigError
from ..conf.schema import Architecture
from ..parallel.mesh import Mesh
from .checkpoint import RandomTensors, SafetensorsFolder, TensorSource, bare_name
from .norm import HeadNorm

if TYPE_CHECKING:
    from .decoder import DecoderLayer
    from .stage import Stage

_BLOCK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """What a family of checkpoints calls its tensors; `transposed` where linear weights stand as [in, out]."""

    embedding: str
    positions: str
    layer: str  # before the names below, with the layer's number
    attention_norm: str
    q: str
    k: str
    v: str
    attention_out: str
    q_norm: str = ""
    k_norm: str = ""
    ffn_norm: str
    gate: str = ""
    up: str
    down: str
    final_norm: str
    head: str = "lm_head.weight"
    transposed: bool = False


LLAMA = Names(
    embedding="model.embed_tokens.weight",
    positions="model.embed_positions.weight",
    layer="model.layers.{}.",
    attention_norm="input_layernorm",
    q="self_attn.q_proj",
    k="self_attn.k_proj",
    v="self_attn.v_proj",
    attention_out="self_attn.o_proj",
    q_norm="self_attn.q_norm.weight",
    k_norm="self_attn.k_norm.weight",
    ffn_norm="post_attention_layernorm",
    gate="mlp.gate_proj",
    up="mlp.up_proj",
    down="mlp.down_proj",
    final_norm="model.norm",
)
GPT2 = Names(
    embedding="transformer.wte.weight",
    positions="transformer.wpe.weight",
    layer="transformer.h.{}.",
    attention_norm="ln_1",
    q="attn.c_attn",  # q, k and v side by side in one tensor
    k="attn.c_attn",
    v="attn.c_attn",
    attention_out="attn.c_proj",
    ffn_norm="ln_2",
    up="mlp.c_fc",
    down="mlp.c_proj",
    final_norm="transformer.ln_f",
    transposed=True,
)


def names_of(arch: Architecture) -> Names:
    """GPT-2's names for learned positions, LLaMA's (which Mistral and Qwen share) for rotary ones."""
    return GPT2 if arch.position == "learned" and not arch.gated_ffn and not arch.qk_norm else LLAMA


def tensor_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint of `arch`, with its shape."""
    names, H, D = names_of(arch), arch.hidden_size, arch.head_dim
    shapes: dict[str, tuple[int, ...]] = {names.embedding: (arch.vocab_size, H)}

    def linear(name: str, out_size: int, in_size: int, bias: bool) -> None:
        shapes[f"{name}.weight"] = (in_size, out_size) if names.transposed else (out_size, in_size)
        if bias:
            shapes[f"{name}.bias"] = (out_size,)

    def norm(name: str) -> None:
        shapes[f"{name}.weight"] = (H,)
        if arch.norm == "layer":
            shapes[f"{name}.bias"] = (H,)

    if arch.position == "learned":
        shapes[names.positions] = (arch.max_position, H)
    for i in range(arch.num_layers):
        prefix = names.layer.format(i)
        norm(prefix + names.attention_norm)
        widths = {prefix + names.q: arch.num_heads * D}
        for name in (names.k, names.v):
            widths[prefix + name] = widths.get(prefix + name, 0) + arch.num_kv_heads * D
        for name, width in widths.items():
            linear(name, width, H, arch.qkv_bias)
        linear(prefix + names.attention_out, H, arch.num_heads * D, arch.attention_out_bias)
        if arch.qk_norm:
            shapes[prefix + names.q_norm] = shapes[prefix + names.k_norm] = (D,)
        norm(prefix + names.ffn_norm)
        for name in (names.gate, names.up) if arch.gated_ffn else (names.up,):
            linear(prefix + name, arch.ffn_size, H, arch.ffn_bias)
        linear(prefix + names.down, H, arch.ffn_size, arch.ffn_bias)
    norm(names.final_norm)
    if not arch.tie_embeddings:
        shapes[names.head] = (arch.vocab_size, H)
    return shapes


@dataclass(frozen=True, slots=True)
class Piece:
    """A slice of tensor `name` and where it goes: `target` [G, rows, columns], or [G, rows] for a vector, a view of a
    parameter. Rows G * rows from `row` and columns from `column`, as [out, in] whatever the file's order."""

    name: str
    target: torch.Tensor
    row: int = 0
    column: int = 0
    transposed: bool = False

    def load(self, source: TensorSource) -> None:
        """Copy block by block, converted to the target's type."""
        target = self.target
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
        for g in range(G):
            start = self.row + g * R
            for first in range(0, R, step):
                last = min(first + step, R)
                target[g, first:last].copy_(source.read(self.name, slice(start + first, start + last), columns))


def plan_pieces(stage: Stage) -> Iterator[Piece]:
    """All that this rank's parameters are made of."""
    arch, mesh, names = stage.arch, stage.mesh, names_of(stage.arch)
    if stage.embedding is not None:
        yield from _vocab_rows(names.embedding, stage.embedding.weight, arch, mesh)
    if stage.position_embedding is not None:
        yield Piece(names.positions, stage.position_embedding[None])
    for i, layer in zip(stage.layers, stage.decoder, strict=True):
        yield from _layer_pieces(layer, names, names.layer.format(i), arch, mesh)  # type: ignore[arg-type]
    if stage.final_norm is not None:
        yield from _norm_pieces(names.final_norm, stage.final_norm)
    if stage.head is not None and not (arch.tie_embeddings and stage.embedding is not None):
        name = names.embedding if arch.tie_embeddings else names.head
        yield from _vocab_rows(name, stage.head.weight, arch, mesh)


def _vocab_rows(name: str, weight: torch.Tensor, arch: Architecture, mesh: Mesh) -> Iterator[Piece]:
    """This rank's rows of the vocabulary; those past its end are zero."""
    first = mesh.tp_rank * len(weight)
    count = min(arch.vocab_size - first, len(weight))
    weight[max(count, 0) :].zero_()
    if count > 0:
        yield Piece(name, weight[None, :count], row=first)


def _norm_pieces(name: str, norm: nn.Module) -> Iterator[Piece]:
    for kind, parameter in norm.named_parameters():
        yield Piece(f"{name}.{kind}", parameter[None])


def _layer_pieces(
    layer: DecoderLayer, names: Names, prefix: str, arch: Architecture, mesh: Mesh
) -> Iterator[Piece]:
    K, G, D, H = arch.num_kv_heads // mesh.tp, arch.num_heads // arch.num_kv_heads, arch.head_dim, arch.hidden_size
    rank, transposed = mesh.tp_rank, names.transposed
    attention, ffn = layer.attention, layer.ffn
    yield from _norm_pieces(prefix + names.attention_norm, layer.attention_norm)
    yield from _norm_pieces(prefix + names.ffn_norm, layer.ffn_norm)
    if isinstance(attention.qk_norm, HeadNorm):
        yield Piece(prefix + names.q_norm, attention.qk_norm.query_weight[None])
        yield Piece(prefix + names.k_norm, attention.qk_norm.key_weight[None])

    heads = (slice(0, G), slice(G, G + 1), slice(G + 1, G + 2))  # of a group: queries, key, value
    before: dict[str, int] = {}  # rows of a tensor that holds several of the three
    for name, part in zip((names.q, names.k, names.v), heads, strict=True):
        count = part.stop - part.start
        row = before.get(name, 0) + rank * K * count * D
        before[name] = before.get(name, 0) + arch.num_kv_heads * count * D
        weight = attention.qkv.weight.view(K, G + 2, D, H)[:, part].view(K, count * D, H)
        yield Piece(f"{prefix}{name}.weight", weight, row=row, transposed=transposed)
        if attention.qkv.bias is not None:
            bias = attention.qkv.bias.view(K, G + 2, D)[:, part].view(K, count * D)
            yield Piece(f"{prefix}{name}.bias", bias, row=row)

    F = arch.ffn_size // mesh.tp
    for i, name in enumerate((names.gate, names.up) if arch.gated_ffn else (names.up,)):
        rows = slice(i * F, (i + 1) * F)
        yield Piece(f"{prefix}{name}.weight", ffn.fc1.weight[None, rows], row=rank * F, transposed=transposed)
        if ffn.fc1.bias is not None:
            yield Piece(f"{prefix}{name}.bias", ffn.fc1.bias[None, rows], row=rank * F)

    for name, linear in ((names.attention_out, attention.out), (names.down, ffn.fc2)):
        column = rank * linear.weight.shape[1]
        yield Piece(f"{prefix}{name}.weight", linear.weight[None], column=column, transposed=transposed)
        if linear.bias is not None:
            yield Piece(f"{prefix}{name}.bias", linear.bias[None])


def load_stage(stage: Stage, folder: Path | None, seed: int) -> None:
    """Fill this rank's parameters from a Hugging Face folder, or from a seed where `folder` is None.

    Raises:
        ConfigError: a tensor is missing, has the wrong shape, or is unknown to the architecture.
    """
    shapes = tensor_shapes(stage.arch)
    source = RandomTensors(shapes, seed) if folder is None else SafetensorsFolder(folder)
    if isinstance(source, SafetensorsFolder):
        _check_unknown(source, stage.arch)
    pieces = list(plan_pieces(stage))
    for piece in pieces:
        _check_shape(source, piece.name, shapes[piece.name], stage.arch)
    pieces.sort(key=lambda piece: piece.target.numel(), reverse=True)  # while there is most room for a block
    for piece in pieces:
        piece.load(source)
    if isinstance(source, SafetensorsFolder):
        source.close()


def _check_shape(source: TensorSource, name: str, expected: tuple[int, ...], arch: Architecture) -> None:
    found = source.shape(name)
    if found is None:
        raise ConfigError(f"{source.where(name)}: tensor {name}, of shape {list(expected)}, is missing")
    if name == names_of(arch).positions:  # model.max_model_len may cap it
        holds = len(found) == 2 and found[0] >= expected[0] and found[1] == expected[1]
    else:
        holds = found == expected
    if not holds:
        raise ConfigError(f"{source.where(name)}: tensor {name} has shape {list(found)}, not {list(expected)}")


def _check_unknown(source: SafetensorsFolder, arch: Architecture) -> None:
    """Tensors that the architecture does not know would be left out in silence; buffers that we compute may be."""
    bare = {bare_name(name) for name in tensor_shapes(arch)}
    buffers = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
    for name, key in source.names().items():
        if name not in bare and not name.endswith(buffers) and name != "lm_head.weight":
            raise ConfigError(f"{source.where(name)}: tensor {key} is not part of the architecture in config.json")
