"""Reads tensors of a GGUF file slice by slice, under the names and in the layout of a Hugging Face checkpoint.

Quantized blocks are read as codes and scales (`blocks.py`), or as float32, by the package `gguf`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...conf.architecture import Architecture
from ...conf.errors import ConfigError
from ...kernels.weight_format import SHORT, WeightFormat
from ..checkpoint import TensorSource, check_shape
from ..layout import names_of, tensor_shapes
from ..names import Names
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
    ffn_norm="ffn_norm",
    gate="ffn_gate",
    up="ffn_up",
    down="ffn_down",
    final_norm="output_norm",
    head="output.weight",
)
_NORMS_AFTER = replace(_LLAMA, attention_norm_after="post_attention_norm", ffn_norm_after="post_ffw_norm")
_ONE_QKV = replace(_LLAMA, q="attn_qkv", k="attn_qkv", v="attn_qkv")  # q, k and v side by side in one tensor
_OF_EXPERTS = replace(  # `<` and `>` enclose an expert's number, or say that it is the shared one
    _LLAMA,
    router="ffn_gate_inp",
    correction="exp_probs_b.bias",
    expert="<{}>",
    expert_gate="ffn_gate",
    expert_up="ffn_up",
    expert_down="ffn_down",
    shared="<shared>",
    shared_gate="ffn_gate_inp_shexp.weight",
)
_LAYER = re.compile(r"blk\.(\d+)\.")
_OF_EXPERT = re.compile(r"<(\w+)>(\w+)")
_OWN = {
    **dict.fromkeys(("gemma2", "gemma3"), _NORMS_AFTER),
    "olmo2": replace(_NORMS_AFTER, attention_norm="", ffn_norm=""),
    "gpt2": _ONE_QKV,
    "phi3": replace(_ONE_QKV, gate="ffn_up", up="ffn_up"),
    "glm4": replace(_NORMS_AFTER, gate="ffn_up", up="ffn_up"),
    "falcon": _ONE_QKV,
    "falcon2": replace(_ONE_QKV, attention_norm="attn_norm_2", ffn_norm="attn_norm"),
    **dict.fromkeys(("mixtral", "qwen-moe", "minimax-m2"), _OF_EXPERTS),
    "glm4-moe": replace(_OF_EXPERTS, ffn_norm="post_attention_norm"),
}
_NEIGHBOURS_TURN = ("llama", "granite", "smollm3")  # architectures, in the file
_COMPUTED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")  # in the architecture
FORMATS = {
    "Q4_0": WeightFormat(4, 32),
    "Q4_1": WeightFormat(4, 32, has_offsets=True),
    "Q5_0": WeightFormat(8, 32),
    "Q5_1": WeightFormat(8, 32, has_offsets=True),
    "Q8_0": WeightFormat(8, 32),
    "Q4_K": WeightFormat(4, 32, has_offsets=True),
    "Q5_K": WeightFormat(8, 32, has_offsets=True),
    "Q6_K": WeightFormat(8, 16),
}
_TYPES = ("F32", "F16", "BF16", *FORMATS)


class GgufTensors(TensorSource):
    """The tensors of a GGUF file, which stays closed between two reads.

    llama.cpp's LLaMA turns neighbouring elements of a head, where the published checkpoints turn halves. So the file
    has the rows of queries and keys in another order, which is undone here, as is that of Falcon: all queries, then
    all keys, then all values. The experts of a layer lie in one tensor, [E, out, in].
    """

    def __init__(self, path: Path, arch: Architecture) -> None:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        self._file = open_gguf(path)
        self._arch = arch
        names, self._shapes = names_of(arch), tensor_shapes(arch)
        linears = {name for name, shape in self._shapes.items() if len(shape) == 2}
        self._transposed = linears - {names.embedding, names.positions, names.head} if names.transposed else set()
        own = _OWN.get(arch.family, _LLAMA)
        self._norm_offset = names.norm_offset  # which llama.cpp's converter has added
        self._names: dict[str, str] = {}
        self._experts: dict[str, int] = {}  # the number of an expert's tensor
        for name, of_file in zip(self._shapes, tensor_shapes(arch, own), strict=True):
            self._names[name] = of_file
            if (found := _OF_EXPERT.search(of_file)) is not None:
                number, part = found.groups()
                end = "_shexp" if number == "shared" else "_exps"
                self._names[name] = of_file.replace(found[0], part + end)
                if number != "shared":
                    self._experts[name] = int(number)
        self._sizes = {int(kind): (kind, *GGML_QUANT_SIZES[kind]) for kind in GGMLQuantizationType}

    def check(self, arch: Architecture, names: Collection[str]) -> None:
        """See `TensorSource.check`. A file that was cut short is refused too."""
        size = self._file.path.stat().st_size
        for name in self._file.tensors.keys() - set(self._names.values()) - {*_COMPUTED, "output.weight"}:
            layer = _LAYER.match(name)
            if names_of(arch).further_layers and layer is not None and int(layer[1]) >= arch.num_layers:
                continue  # it only predicts further tokens
            raise ConfigError(f"{self._file.path}: tensor {name} is not part of the architecture in its fields")
        for name in names:
            own, longer = self._names[name], name == names_of(arch).positions
            found, expected = self.shape(name), self._shapes[name]
            if name in self._experts and found is not None:
                assert arch.experts is not None
                found, expected = self._file.tensors[own].shape, (arch.experts.num_experts, *expected)
            check_shape(own, str(self._file.path), found, expected, may_be_longer=longer)
            place = self._file.tensors[own]
            kind, block, block_bytes = self._sizes.get(place.type, (None, 1, 1))
            if kind is None or kind.name not in _TYPES:
                of = f"type {place.type if kind is None else kind.name}"
                raise ConfigError(f"{self._file.path}: tensor {own} has {of}; must be one of {', '.join(_TYPES)}")
            if place.shape[-1] % block:
                raise ConfigError(f"{self._file.path}: tensor {own} has rows that are no whole blocks of {block}")
            if place.offset + math.prod(place.shape) // block * block_bytes > size:
                raise ConfigError(f"{self._file.path}: tensor {own} lies beyond the end of the file; is it cut short?")

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of the whole tensor, as a Hugging Face checkpoint has it; None where it is missing."""
        place = self._file.tensors.get(self._names.get(name, ""))
        if place is None:
            return None
        if name in self._experts:
            return place.shape[1:]
        if len(place.shape) < len(self._shapes[name]):  # one row
            return (1, *place.shape)
        return place.shape[::-1] if name in self._transposed else place.shape

    def read(self, name: str, rows: slice, columns: slice | None) -> torch.Tensor:
        """See `TensorSource.read`: float32, whatever the file's type."""
        place = self._file.tensors[self._names[name]]
        if columns is None:
            vector = self._read_rows(name, 0, 1, slice(0, math.prod(place.shape)))[0, self._order(name, rows)]
            return vector - self._norm_offset if name.endswith("norm.weight") else vector
        if name in self._transposed:
            return self._read_rows(name, columns.start, columns.stop, rows).T
        order = self._order(name, rows)
        if isinstance(order, slice):
            return self._read_rows(name, rows.start, rows.stop, columns)
        first, last = int(order.min()), int(order.max()) + 1
        return self._read_rows(name, first, last, columns)[order - first]

    def format(self, name: str) -> WeightFormat | None:
        """See `TensorSource.format`."""
        place = self._file.tensors.get(self._names.get(name, ""))
        kind = None if place is None else self._sizes.get(place.type)
        return None if kind is None else (FORMATS | SHORT).get(kind[0].name)

    def read_quantized(self, name: str, rows: slice, columns: slice) -> QuantizedMatrix:
        """See `TensorSource.read_quantized`."""
        from .blocks import read_blocks

        kind, block, block_bytes = self._sizes[self._file.tensors[self._names[name]].type]
        order = self._order(name, rows)
        first, last = (rows.start, rows.stop) if isinstance(order, slice) else (int(order.min()), int(order.max()) + 1)
        data = self._read_bytes(name, first, last, columns).reshape(last - first, -1, block_bytes)
        if not isinstance(order, slice):
            data = data[order.numpy() - first]
        return read_blocks(kind.name, FORMATS[kind.name], data, block, columns)

    def _order(self, name: str, rows: slice) -> torch.Tensor | slice:
        """Return the file's rows that are `rows` of the checkpoint."""
        import torch

        kind, layer = self._file.get("general.architecture"), name.rsplit(".", 2)[-2]
        D, K = self._arch.head_dim, self._arch.num_kv_heads
        row = torch.arange(rows.start, rows.stop)
        if kind == "falcon" and layer == "query_key_value":
            G = self._arch.num_heads // K
            group, head = row // D // (G + 2), row // D % (G + 2)
            at = torch.where(head < G, group * G + head, (G + head - G) * K + group)
            return at * D + row % D
        if kind not in _NEIGHBOURS_TURN or layer not in ("q_proj", "k_proj"):
            return rows
        within = row % D
        return row - within + within % (D // 2) * 2 + within // (D // 2)

    def _read_rows(self, name: str, first: int, last: int, columns: slice) -> torch.Tensor:
        """Read rows and columns of the tensor as the file has it; a vector is one row."""
        import numpy as np
        import torch
        from gguf import dequantize

        kind, block, _ = self._sizes[self._file.tensors[self._names[name]].type]
        values = dequantize(self._read_bytes(name, first, last, columns), kind)
        begin = columns.start // block * block
        cut = slice(columns.start - begin, columns.stop - begin)
        return torch.from_numpy(np.ascontiguousarray(values[:, cut], dtype=np.float32))

    def _read_bytes(self, name: str, first: int, last: int, columns: slice) -> npt.NDArray[np.uint8]:
        """Read the blocks that rows and columns touch, [rows, bytes]."""
        import numpy as np

        place = self._file.tensors[self._names[name]]
        _, block, block_bytes = self._sizes[place.type]
        row_bytes = place.shape[-1] // block * block_bytes
        if name in self._experts:
            before = self._experts[name] * place.shape[1]
            first, last = before + first, before + last
        data = np.fromfile(
            self._file.path, np.uint8, (last - first) * row_bytes, offset=place.offset + first * row_bytes
        ).reshape(last - first, row_bytes)
        begin, end = columns.start // block, -(-columns.stop // block)
        return np.ascontiguousarray(data[:, begin * block_bytes : end * block_bytes])
