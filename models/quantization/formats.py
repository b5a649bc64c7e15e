"""Derives the formats in which a rank holds its weights from the checkpoint's formats. Imports no torch.

A fused matrix, such as q, k and v, takes a format that holds each part exactly: the most bits and the largest common
group size. If tensor parallelism splits groups, smaller groups repeat the scale. A matrix is held in the model's type
if a part is not quantized, if integer and float parts are mixed, or if groups would be too small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ...conf.architecture import Architecture
from ...kernels.processor import multiplies_bfloat16
from ...kernels.weight_format import WeightFormat
from ..layout import expert_weights, linear_weights, names_of, tensor_shapes

_GROUP_UNIT = 16  # group sizes are multiples of it: a GEMM reads this many columns at a time

FormatOf = Callable[[str], WeightFormat | None]  # by weight name, like `TensorSource.format`


@dataclass(frozen=True, slots=True)
class LayerFormats:
    """The formats of a decoder layer's matrices on a rank; None: unquantized, in the model's dtype.

    In an MoE layer, fc1 and fc2 are the formats of the routed experts, and there may be a shared expert.
    """

    qkv: WeightFormat | None = None
    out: WeightFormat | None = None
    fc1: WeightFormat | None = None
    fc2: WeightFormat | None = None
    shared_fc1: WeightFormat | None = None
    shared_fc2: WeightFormat | None = None

    @property
    def experts(self) -> tuple[WeightFormat, WeightFormat] | None:
        """The formats of the routed experts, whose two matrices are either both quantized or neither."""
        return None if self.fc1 is None or self.fc2 is None else (self.fc1, self.fc2)

    @property
    def shared(self) -> LayerFormats:
        """The formats of the shared expert, as a dense feed-forward block."""
        return LayerFormats(fc1=self.shared_fc1, fc2=self.shared_fc2)


@dataclass(frozen=True, slots=True)
class ModelFormats:
    """The formats of a rank's layers, embedding and LM head; a tied head has the embedding's format."""

    layers: tuple[LayerFormats, ...]
    embedding: WeightFormat | None = None
    head: WeightFormat | None = None

    @property
    def typical(self) -> WeightFormat | None:
        """The format of most weights, taken from the middle layer's feed-forward block."""
        return self.layers[len(self.layers) // 2].fc1


def plain_formats(arch: Architecture) -> ModelFormats:
    """Return the formats of a model without quantized weights."""
    return ModelFormats((LayerFormats(),) * arch.num_layers)


def model_formats(
    format_of: FormatOf, arch: Architecture, tp: int, device: str, *, whole_experts: bool = False
) -> ModelFormats:
    """Return the formats of a rank's matrices, given the tensors' formats.

    CPUs without bfloat16 multiplication have GEMMs for 4-bit and 16-bit floats. Other CPUs convert 4-bit floats to
    8-bit integers and keep no other floats quantized. They and CUDA convert codebook indices to 8-bit integers too. All
    experts of a layer have one format. `whole_experts`: each rank holds whole experts, so their groups are not split.
    """
    names, H = names_of(arch), arch.hidden_size

    def of(name: str) -> WeightFormat | None:
        format = format_of(name)
        if format is None:
            return None
        has_bfloat16 = device != "cpu" or multiplies_bfloat16()
        if format.bits == 16:
            return None if has_bfloat16 else format
        if (format.has_table and not has_bfloat16) or not (format.codebook or (format.is_float and device == "cpu")):
            return format
        return _as_integers(format) if format.has_table else None

    def common(prefix: str, parts: Iterable[str], in_size: int, ranks: int = 1) -> WeightFormat | None:
        return common_format([of(f"{prefix}{part}.weight") for part in dict.fromkeys(parts)], in_size // ranks)

    def layer(i: int) -> LayerFormats:
        prefix = names.layer.format(i)
        qkv = None if arch.latent is not None else common(prefix, (names.q, names.k, names.v), H)
        out = common(prefix, [names.attention_out], arch.num_heads * arch.value_dim, tp)
        if arch.experts is not None and arch.kind(i).experts:
            gate_up, down = expert_weights(names, prefix, arch.experts.num_experts)
            fc1 = common_format([of(name) for name in gate_up], H)
            fc2 = common_format([of(name) for name in down], arch.expert_size // (1 if whole_experts else tp))
            fc1, fc2 = (fc1, fc2) if fc1 and fc2 and (fc1.bits == 16) == (fc2.bits == 16) else (None, None)
            gate, up, down_name = names.of_shared
            size = arch.experts.shared_ffn_size
            shared_fc1, shared_fc2 = (
                (common(prefix, (gate, up), H), common(prefix, [down_name], size, tp)) if size else (None, None)
            )
            return LayerFormats(qkv, out, fc1, fc2, shared_fc1, shared_fc2)
        return LayerFormats(
            qkv=qkv,
            out=out,
            fc1=common(prefix, (names.gate, names.up) if arch.gated_ffn else [names.up], H),
            fc2=common(prefix, [names.down], arch.ffn_size, tp),
        )

    embedding = common_format([of(names.embedding)], H)
    head = embedding if arch.tie_embeddings else common_format([of(names.head)], H)
    return ModelFormats(tuple(layer(i) for i in range(arch.num_layers)), embedding, head)


def cut_too_small(format_of: FormatOf, arch: Architecture, tp: int, *, whole_experts: bool = False) -> str | None:
    """Return a message about a weight that cannot stay quantized because `tp` splits its groups; None: no such one."""
    names = names_of(arch)
    for i in range(arch.num_layers):
        prefix = names.layer.format(i)
        cut = [(f"{prefix}{names.attention_out}.weight", arch.num_heads * arch.value_dim)]
        if arch.experts is None or not arch.kind(i).experts:
            cut.append((f"{prefix}{names.down}.weight", arch.ffn_size))
        elif not whole_experts:
            cut.append((expert_weights(names, prefix, 1)[1][0], arch.expert_size))
        for full, size in cut:
            own = [format_of(full)]
            if own[0] is not None and own[0].bits == 16:
                continue
            fitting = [ranks for ranks in range(tp, 0, -1) if size % ranks == 0 and common_format(own, size // ranks)]
            if fitting and fitting[0] != tp:
                return (
                    f"parallel.tp={tp} cuts the groups of tensor {full} to less than {_GROUP_UNIT}, so it is held in "
                    f"the model's type; with parallel.tp={fitting[0]} it stays quantized"
                )
    return None


def rounded_formats(kind: str, arch: Architecture) -> FormatOf:
    """Return the formats to which `model.quantization` quantizes.

    int8 has one scale per row, and the GEMM quantizes activations too. int4 has a scale and an offset per 32 inputs.
    Both have an embedding and LM head of 8 bits in groups of 32: each token reads the whole head, and 4 bits cost more
    there than in a layer (`benchmarks/precision.py`). fp8 has one scale per row, and leaves these two unquantized.
    """
    names, shapes, transposed = names_of(arch), tensor_shapes(arch), linear_weights(arch)

    def format_of(name: str) -> WeightFormat | None:
        if name not in transposed:
            return None
        in_size = shapes[name][0 if transposed[name] else 1]
        return rounded_format(kind, in_size, is_table=name in (names.embedding, names.head))

    return format_of


def rounded_format(kind: str, in_size: int, *, is_table: bool) -> WeightFormat | None:
    """Return the format to which `model.quantization` quantizes a weight; `is_table`: the embedding or LM head."""
    if is_table:
        return None if kind == "fp8" else WeightFormat(8, math.gcd(32, in_size))
    if kind == "int4":
        return WeightFormat(4, math.gcd(32, in_size), has_offsets=True)
    return WeightFormat(8, in_size, int8_activations=kind == "int8", is_float=kind == "fp8")


def common_format(formats: list[WeightFormat | None], in_size: int) -> WeightFormat | None:
    """Return a format that holds all of these exactly, for `in_size` inputs; None if there is none."""
    known = [each for each in formats if each is not None]
    group = math.gcd(in_size, *(each.group for each in known))
    if len(_kinds(known)) > 1:
        known = [_as_integers(each) for each in known]
    if len(known) < len(formats) or len(_kinds(known)) > 1 or group % _GROUP_UNIT:
        return None
    return WeightFormat(
        max(each.bits for each in known),
        group,
        has_offsets=any(each.has_offsets for each in known),
        int8_activations=group == in_size and all(each.int8_activations for each in known),
        is_float=known[0].is_float,
        is_half=known[0].is_half,
        codebook=known[0].codebook,
        half_scales=all(each.half_scales for each in known),
    )


def _kinds(formats: list[WeightFormat]) -> set[object]:
    """Return the distinct value types of the formats."""
    return {((each.bits, each.is_half) if each.is_float else None, each.codebook) for each in formats}


def _as_integers(format: WeightFormat) -> WeightFormat:
    """Return the 8-bit integer format that holds 4-bit floats or codebook entries; other formats are unchanged."""
    return WeightFormat(8, format.group) if format.has_table else format
