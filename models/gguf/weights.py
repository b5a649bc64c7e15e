"""Reads slices of GGUF tensors under the names and in the layout of a Hugging Face checkpoint.

Quantized blocks are read as quantized values and scales (`blocks.py`), or as float32 by the package `gguf`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ...conf.architecture import Architecture
from ...conf.errors import ConfigError
from ...kernels.weight_format import SHORT, WeightFormat
from ..layout import linear_weights, names_of, tensor_shapes
from ..names import LatentNames, Names
from ..quantization.formats import common_format
from ..safetensors_folder import TensorSource, check_shape
from .block_types import BLOCK_TYPES
from .file import open_gguf

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from ...kernels.quantized_matrix import QuantizedMatrix

_LLAMA = Names(
    embedding="token_embd.weight",
    positions="position_embd.weight",
    layer="blk.{}.",
    attention_norm="attn_norm",
    q="attn_q",
    k="attn_k",
    v="attn_v",
    attention_out="attn_output",
    q_norm="attn_q_norm.weight",
    k_norm="attn_k_norm.weight",
    sinks="attn_sinks.weight",
    ffn_norm="ffn_norm",
    gate="ffn_gate",
    up="ffn_up",
    down="ffn_down",
    router="ffn_gate_inp",
    correction="exp_probs_b.bias",
    expert="<{}>",  # `<` and `>` enclose an expert's number, or `shared`
    expert_gate="ffn_gate",
    expert_up="ffn_up",
    expert_down="ffn_down",
    shared="<shared>",
    shared_gate="ffn_gate_inp_shexp.weight",
    latent=LatentNames(
        query="attn_q",
        query_down="attn_q_a",
        query_norm="attn_q_a_norm.weight",
        query_up="attn_q_b",
        down="attn_kv_a_mqa",
        norm="attn_kv_a_norm.weight",
        up="attn_kv_b",
    ),
    final_norm="output_norm",
    head="output.weight",
)
_NORMS_AFTER = replace(_LLAMA, attention_norm_after="post_attention_norm", ffn_norm_after="post_ffw_norm")
_ONE_QKV = replace(_LLAMA, q="attn_qkv", k="attn_qkv", v="attn_qkv")  # q, k and v side by side in one tensor
_NORM_BETWEEN = replace(_LLAMA, ffn_norm="post_attention_norm")
_LAYER = re.compile(r"blk\.(\d+)\.")
_OF_EXPERT = re.compile(r"<(?P<expert>\w+)>(?P<part>\w+)|(?P<all>ffn_\w+)_proj(?P<bias>_bias)?\[(?P<number>\d+)\]")
_OWN = {
    **dict.fromkeys(("gemma2", "gemma3"), _NORMS_AFTER),
    **dict.fromkeys(("olmo2", "exaone4"), replace(_NORMS_AFTER, attention_norm="", ffn_norm="")),
    **dict.fromkeys(("gpt2", "falcon", "gpt_neox", "internlm2"), _ONE_QKV),
    "phi3": replace(_ONE_QKV, gate="ffn_up", up="ffn_up"),
    "glm": replace(_LLAMA, gate="ffn_up", up="ffn_up"),
    "glm4": replace(_NORMS_AFTER, gate="ffn_up", up="ffn_up"),
    "falcon2": replace(_ONE_QKV, attention_norm="attn_norm_2", ffn_norm="attn_norm"),
    **dict.fromkeys(("glm4-moe", "seed-oss"), _NORM_BETWEEN),
    "gpt-oss": replace(_NORM_BETWEEN, fused_experts="ffn_"),
    "granite-moe": replace(_LLAMA, expert_gate="ffn_gate_up", expert_up="ffn_gate_up"),
}
_JOINED = {"attn_qkv": ("attn_q", "attn_k", "attn_v"), "ffn_gate_up_exps": ("ffn_gate_exps", "ffn_up_exps")}
_NEIGHBOURS_TURN = (  # GGUF architectures with interleaved (GPT-J style) RoPE
    *("llama", "granite", "granitemoe", "smollm3", "mistral3", "arcee", "olmo", "minicpm", "internlm2"),
)
_COMPUTED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")  # RoPE scaling factors
_FORMATS = {name: type.format for name, type in BLOCK_TYPES.items()} | SHORT
_TYPES = ("F32", "F16", "BF16", *BLOCK_TYPES)


@dataclass(frozen=True, slots=True)
class _Part:
    """A range of rows of a tensor in the file.

    Attributes:
        name: tensor name.
        shape: shape of the whole tensor.
        first: first row, with all but the last dimension flattened; a vector has one number per row.
        count: number of rows.
        width: columns.
        by_head: the tensor is [heads, columns, rows], so that each head is transposed.
    """

    name: str
    shape: tuple[int, ...]
    first: int
    count: int
    width: int
    by_head: bool = False


@dataclass(frozen=True, slots=True)
class _Stored:
    """How the file stores a checkpoint tensor: as the concatenated rows of parts, possibly in another order.

    Attributes:
        parts: parts of the file's tensors.
        order: row order of the checkpoint. grouped: each KV group's queries, key and value; heads: each head's key,
            then its value; turns: rows of two parts, interleaved.
        turned: number of leading rows that the file stores for interleaved RoPE, the checkpoint for half-split RoPE.
        transposed: the checkpoint has [in, out].
    """

    parts: tuple[_Part, ...]
    order: Literal["same", "grouped", "heads", "turns"] = "same"
    turned: int = 0
    transposed: bool = False


class GgufTensors(TensorSource):
    """The tensors of a GGUF file, which is closed between reads.

    llama.cpp's LLaMA has interleaved RoPE, the published checkpoints half-split (NeoX style) RoPE. The permuted query
    and key rows are restored here, and so are the rows of Falcon and GPT-NeoX, which the file stores as all queries,
    all keys, then all values. A layer's experts are one tensor, [E, out, in]. Tensors that are fused in most files,
    such as q, k and v of GPT-2, may be separate in others, and vice versa.
    """

    def __init__(self, path: Path, arch: Architecture) -> None:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        self._file = open_gguf(path)
        self._arch = arch
        self._shapes, transposed = tensor_shapes(arch), linear_weights(arch)
        self._norm_offset = names_of(arch).norm_offset  # which llama.cpp's converter has added
        of_file = tensor_shapes(arch, _OWN.get(arch.family, _LLAMA))
        self._stored = {
            name: self._find(own, self._shapes[name], transposed.get(name, False))
            for name, own in zip(self._shapes, of_file, strict=True)
        }
        self._sizes = {int(kind): (kind.name, *GGML_QUANT_SIZES[kind]) for kind in GGMLQuantizationType}

    def _find(self, name: str, shape: tuple[int, ...], transposed: bool) -> _Stored:
        """Return how the file stores a checkpoint tensor; `name` is its usual GGUF name."""
        arch, tensors = self._arch, self._file.tensors
        N, K, D, F = arch.num_heads, arch.num_kv_heads, arch.head_dim, arch.expert_size
        expert, experts = 0, list[int]()
        if (found := _OF_EXPERT.search(name)) is not None:
            of = found.groupdict()
            end = f"{of['all']}_exps.{'bias' if of['bias'] else 'weight'}" if of["all"] else f"{of['part']}_exps"
            if of["expert"] == "shared":
                end = f"{of['part']}_shexp"
            else:
                assert arch.experts is not None
                expert, experts = int(of["number"] or of["expert"]), [arch.experts.num_experts]
            name = name.replace(found[0], end)
        rows, *columns = shape[::-1] if transposed else shape
        width = columns[0] if columns else 1

        def part(base: str, first: int, count: int, all_rows: int) -> _Part:
            whole = (*experts, all_rows, *columns)
            return _Part(name.replace(own, base), whole, expert * all_rows + first, count, width)

        own = name.split(".")[-2]
        sizes = {"attn_q": N * D, "attn_k": K * D, "attn_v": K * D, "ffn_gate_exps": F, "ffn_up_exps": F}
        joined = next((key for key, parts in _JOINED.items() if own in parts and arch.latent is None), None)
        parts: tuple[_Part, ...] = (part(own, 0, rows, rows),)
        if name not in tensors and own in _JOINED:
            parts = tuple(part(each, 0, sizes[each], sizes[each]) for each in _JOINED[own])
        elif name not in tensors and joined is not None and name.replace(own, joined) in tensors:
            before = [sizes[each] for each in _JOINED[joined][: _JOINED[joined].index(own)]]
            parts = (part(joined, sum(before), rows, sum(sizes[each] for each in _JOINED[joined])),)
        if own == "attn_kv_b" and name not in tensors:
            assert arch.latent is not None
            rank, key, value = arch.latent.rank, arch.latent.head_dim, arch.latent.value_dim
            return _Stored(
                (
                    _Part(name.replace(own, "attn_k_b"), (N, rank, key), 0, N * key, key, by_head=True),
                    _Part(name.replace(own, "attn_v_b"), (N, value, rank), 0, N * value, rank),
                ),
                "heads",
            )
        turned = {"attn_q": rows, "attn_k": rows, "attn_qkv": (N + K) * D}.get(own, 0)
        if self._file.get("general.architecture") not in _NEIGHBOURS_TURN:
            turned = 0
        names = names_of(arch)
        is_grouped, takes_turns = own == "attn_qkv" and names.grouped, own == "ffn_gate_up_exps" and names.fused_experts
        order: Any = "grouped" if is_grouped else "turns" if takes_turns else "same"
        return _Stored(parts, order, turned, transposed)

    def check(self, arch: Architecture, names: Collection[str]) -> None:
        """See `TensorSource.check`. A truncated file is rejected too."""
        known = {part.name for stored in self._stored.values() for part in stored.parts}
        for name in self._file.tensors.keys() - known - {*_COMPUTED, "output.weight"}:
            layer = _LAYER.match(name)
            if names_of(arch).further_layers and layer is not None and int(layer[1]) >= arch.num_layers:
                continue  # an MTP layer
            where = self._file.tensors[name].path
            raise ConfigError(f"{where}: tensor {name} is not part of the architecture in its fields")
        for name in names:
            for part in self._stored[name].parts:
                self._check_part(part, may_be_longer=name == names_of(arch).positions)

    def _check_part(self, part: _Part, *, may_be_longer: bool) -> None:
        place = self._file.tensors.get(part.name)
        found = None if place is None else place.shape
        if found == part.shape[1:] and part.shape[0] == 1:  # one row
            found = part.shape
        where = self._file.path if place is None else place.path
        check_shape(part.name, str(where), found, part.shape, may_be_longer=may_be_longer)
        assert place is not None
        kind, block, block_bytes = self._sizes.get(place.type, (f"{place.type}", 1, 1))
        if kind not in _TYPES:
            raise ConfigError(f"{where}: tensor {part.name} has type {kind}; must be one of {', '.join(_TYPES)}")
        if place.shape[-1] % block:
            raise ConfigError(f"{where}: tensor {part.name} has rows that are not multiples of the block size, {block}")
        if place.offset + math.prod(place.shape) // block * block_bytes > where.stat().st_size:
            raise ConfigError(f"{where}: tensor {part.name} lies beyond the end of the file; is it cut short?")

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of the whole tensor in the Hugging Face layout; None if it is missing."""
        stored = self._stored.get(name)
        has_all = stored is not None and all(part.name in self._file.tensors for part in stored.parts)
        return self._shapes[name] if has_all else None

    def read(self, name: str, rows: slice, columns: slice | None) -> torch.Tensor:
        """See `TensorSource.read`: float32, whatever the file's type."""
        if columns is None:
            vector = self._numbers(name, rows, slice(0, 1))[:, 0]
            return vector - self._norm_offset if name.endswith("norm.weight") else vector
        if self._stored[name].transposed:
            return self._numbers(name, columns, rows).T
        return self._numbers(name, rows, columns)

    def format(self, name: str) -> WeightFormat | None:
        """See `TensorSource.format`."""
        if self.shape(name) is None:
            return None
        parts = self._stored[name].parts
        formats = [None if part.by_head else _FORMATS.get(self._kind(part)[0]) for part in parts]
        return formats[0] if len(parts) == 1 else common_format(formats, parts[0].width)

    def read_quantized(self, name: str, rows: slice, columns: slice) -> QuantizedMatrix:
        """See `TensorSource.read_quantized`."""
        import torch

        from ...kernels.quantized_matrix import QuantizedMatrix
        from ..quantization.matrices import converted
        from .blocks import read_blocks

        places, found = [], []
        for which, part, at in self._by_part(name, rows):
            kind, block, block_bytes = self._kind(part)
            data = self._read_bytes(part, at, columns).reshape(len(at), -1, block_bytes)
            found.append(read_blocks(BLOCK_TYPES[kind], data, block, columns))
            places.append(which)
        if len(found) == 1:
            return found[0]
        format = common_format([each.format for each in found], columns.stop - columns.start)
        assert format is not None, name
        own, order = [converted(each, format) for each in found], torch.cat(places).argsort()
        codes, scales = (torch.cat(of)[order] for of in zip(*((each.codes, each.scales) for each in own), strict=True))
        offsets = [each.offsets for each in own if each.offsets is not None]
        return QuantizedMatrix(format, codes, scales, torch.cat(offsets)[order] if offsets else None)

    def _kind(self, part: _Part) -> tuple[str, int, int]:
        """Return the name of a part's type, and its columns and bytes per block."""
        return self._sizes.get(self._file.tensors[part.name].type, ("", 1, 1))

    def _order(self, name: str, rows: slice) -> torch.Tensor:
        """Map the checkpoint's `rows` to rows of the concatenated parts."""
        import torch

        stored, row, arch = self._stored[name], torch.arange(rows.start, rows.stop), self._arch
        N, K, D = arch.num_heads, arch.num_kv_heads, arch.head_dim
        if stored.order == "grouped":
            G = N // K
            group, head = row // D // (G + 2), row // D % (G + 2)
            row = torch.where(head < G, group * G + head, head * K + group) * D + row % D
        elif stored.order == "heads":
            assert arch.latent is not None
            keys, values = arch.latent.head_dim, arch.latent.value_dim
            head, within = row // (keys + values), row % (keys + values)
            row = torch.where(within < keys, head * keys, (N - 1) * keys + head * values) + within
        elif stored.order == "turns":
            row = row % 2 * stored.parts[0].count + row // 2
        within = row % D
        return torch.where(row < stored.turned, row - within + within % (D // 2) * 2 + within // (D // 2), row)

    def _by_part(self, name: str, rows: slice) -> Iterator[tuple[torch.Tensor, _Part, torch.Tensor]]:
        """For each part with some of the rows, yield their indices in `rows`, the part, and the rows in its tensor."""
        order, end = self._order(name, rows), 0
        for part in self._stored[name].parts:
            begin, end = end, end + part.count
            which = ((order >= begin) & (order < end)).nonzero()[:, 0]
            if len(which):
                yield which, part, order[which] - begin + part.first

    def _numbers(self, name: str, rows: slice, columns: slice) -> torch.Tensor:
        """Read rows and columns of the [out, in] matrix; a vector has one column."""
        import torch

        out = torch.empty(rows.stop - rows.start, columns.stop - columns.start)
        for which, part, at in self._by_part(name, rows):
            if part.by_head:
                head, (_, rank, width) = at // part.width, part.shape
                first, last = int(head.min()), int(head.max()) + 1
                whole = self._dequantized(part, torch.arange(first * rank, last * rank), slice(0, width))
                heads = whole.view(-1, rank, width).transpose(1, 2).flatten(0, 1)
                out[which] = heads[at - first * width, columns]
            else:
                out[which] = self._dequantized(part, at, columns)
        return out

    def _dequantized(self, part: _Part, rows: torch.Tensor, columns: slice) -> torch.Tensor:
        import numpy as np
        import torch
        from gguf import GGMLQuantizationType, dequantize

        kind, block, _ = self._kind(part)
        values = dequantize(self._read_bytes(part, rows, columns), GGMLQuantizationType[kind])
        begin = columns.start // block * block
        cut = slice(columns.start - begin, columns.stop - begin)
        return torch.from_numpy(np.ascontiguousarray(values[:, cut], dtype=np.float32))

    def _read_bytes(self, part: _Part, rows: torch.Tensor, columns: slice) -> npt.NDArray[np.uint8]:
        """Read the blocks that cover the rows and columns, [rows, bytes]."""
        import numpy as np

        place, (_, block, block_bytes) = self._file.tensors[part.name], self._kind(part)
        row_bytes = part.width // block * block_bytes
        first, last = int(rows.min()), int(rows.max()) + 1
        data = np.fromfile(place.path, np.uint8, (last - first) * row_bytes, offset=place.offset + first * row_bytes)
        begin, end = columns.start // block, -(-columns.stop // block)
        touched = data.reshape(last - first, row_bytes)[:, begin * block_bytes : end * block_bytes]
        is_run = len(rows) == last - first and bool((rows.diff() == 1).all())
        return np.ascontiguousarray(touched if is_run else touched[(rows - first).numpy()])
