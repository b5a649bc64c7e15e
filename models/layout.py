"""The names and shapes of a checkpoint's tensors, by model family. Imports no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from ..conf.errors import ConfigError
from ..conf.schema import Architecture


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """The tensor names of a family of checkpoints."""

    embedding: str
    positions: str
    layer: str  # prefix of a layer's tensors, with {} for the layer's number
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
    transposed: bool = False  # linear weights are stored as [in, out]


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


# The keys of a config.json that decide a tensor's presence or shape, by field of the architecture.
_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim or num_attention_heads",
    "ffn_size": "intermediate_size",
    "max_position": "max_position_embeddings",
    "qkv_bias": "attention_bias",
    "attention_out_bias": "attention_bias",
    "ffn_bias": "mlp_bias",
    "tie_embeddings": "tie_word_embeddings",
}
_GPT2_KEYS = {
    "hidden_size": "n_embd or hidden_size",
    "num_layers": "n_layer or num_hidden_layers",
    "ffn_size": "n_inner",
    "max_position": "n_positions or max_position_embeddings",
    "vocab_size": "vocab_size",
    "tie_embeddings": "tie_word_embeddings",
}


def names_of(arch: Architecture) -> Names:
    """Return GPT-2's names for learned positions, else LLaMA's names, which Mistral and Qwen share."""
    return GPT2 if arch.position == "learned" and not arch.gated_ffn and not arch.qk_norm else LLAMA


def tensor_shapes(arch: Architecture, names: Names | None = None) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor in a checkpoint of `arch`, by name: by `names_of(arch)` or those given."""
    names, H, D = names or names_of(arch), arch.hidden_size, arch.head_dim
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


def linear_weights(arch: Architecture) -> dict[str, bool]:
    """Return the names of the embedding's, the linear layers' and the head's weights, and whether each is [in, out]."""
    names = names_of(arch)
    rows = {names.embedding, names.head}  # as torch has them in every family
    return {
        name: names.transposed and name not in rows
        for name, shape in tensor_shapes(arch).items()
        if len(shape) == 2 and name != names.positions
    }


def deciding_keys(arch: Architecture, name: str) -> str:
    """Return the keys of config.json on which it depends whether there is a tensor `name` and of what shape.

    It is found by changing each field of the architecture. The text goes at the end of an error.
    """

    def shape(arch: Architecture) -> tuple[int, ...] | None:
        return next((shape for full, shape in tensor_shapes(arch).items() if full.endswith(name)), None)

    last = max(map(int, re.findall(r"\.(\d+)\.", f".{name}")), default=0)
    keys: dict[str, None] = {}
    for field, key in (_GPT2_KEYS if names_of(arch) is GPT2 else _KEYS).items():
        value = getattr(arch, field)
        other = not value if isinstance(value, bool) else 2 * value
        if field == "num_layers":
            other = last if 0 < last < value else max(2 * value, last + 1)
        if field == "num_kv_heads" and value == arch.num_heads:
            other = 1
        try:
            changes: dict[str, Any] = {field: other}
            changed = replace(arch, **changes)
        except ConfigError:
            continue
        if shape(changed) != shape(arch):
            keys[key] = None
    return f" ({', '.join(keys)} in config.json)" if keys else ""
