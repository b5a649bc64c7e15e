"""Translates the fields of a GGUF file into those of a Hugging Face `config.json`. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ...conf.errors import ConfigError
from .file import GgufFile

_ROPE_FACTORS = "rope_freqs.weight"
_F32 = 0
_LAYERS_OF_27B = 62  # of Gemma 3, whose largest model scales scores by another width
_NAMES = {
    "llama": "LlamaForCausalLM",  # Mistral and SmolLM too
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gemma3": "Gemma3ForCausalLM",
}
_END_TOKENS = ("eos", "eot", "eom")  # of a text, of a turn, of a message


def config_values(file: GgufFile) -> dict[str, Any]:
    """Return the file's architecture under the keys of `config.json`.

    Raises:
        ConfigError: the architecture or a feature of it is not supported, or a field is missing.
    """
    name = _supported(file)

    def field(key: str, *default: Any) -> Any:
        if (value := file.get(f"{name}.{key}", *default)) is None and not default:
            raise ConfigError(f"{file.path}: the field {name}.{key} is missing")
        return value

    ends = [file.get(f"tokenizer.ggml.{kind}_token_id") for kind in _END_TOKENS]
    common = {
        "architectures": [_NAMES[name]],
        "vocab_size": _shape(file, "token_embd.weight")[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(dict.fromkeys(end for end in ends if end is not None)),
    }
    if name == "gpt2":
        return common | _gpt2(field)
    return common | _rotary(file, field) | (_gemma3(field) if name == "gemma3" else {})


def _supported(file: GgufFile) -> str:
    """Return the name of the file's architecture, which is one of those that are computed here."""
    name = file.get("general.architecture")
    if name not in _NAMES:
        raise ConfigError(
            f"{file.path}: general.architecture={name!r} is not supported; supported: {', '.join(_NAMES)}"
        )
    if (kind := file.get("general.type", "model")) != "model":
        raise ConfigError(f"{file.path}: general.type={kind!r}: must be a model")
    if (parts := file.get("split.count", 1)) > 1:
        raise ConfigError(f"{file.path}: one of {parts} parts of a model; join them, as with llama-gguf-split --merge")
    if file.get(f"{name}.expert_count", 0):
        raise ConfigError(f"{file.path}: {name}.expert_count: GGUF files of experts are not read yet")
    return str(name)


def _shape(file: GgufFile, name: str) -> tuple[int, ...]:
    if name not in file.tensors:
        raise ConfigError(f"{file.path}: tensor {name} is missing")
    return file.tensors[name].shape


def _rotary(file: GgufFile, field: Callable[..., Any]) -> dict[str, Any]:
    hidden, heads = field("embedding_length"), field("attention.head_count")
    head_dim = field("attention.key_length", hidden // heads if heads else hidden)
    turned = field("rope.dimension_count", head_dim)
    if turned != head_dim:
        raise ConfigError(f"{file.path}: rope.dimension_count={turned}: must be the size of a head, {head_dim}")
    return {
        "hidden_size": hidden,
        "intermediate_size": field("feed_forward_length"),
        "num_hidden_layers": field("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": field("context_length"),
        "rms_norm_eps": field("attention.layer_norm_rms_epsilon"),
        "rope_theta": field("rope.freq_base", 10000.0),
        "rope_scaling": _scaling(file, field),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in file.tensors,
    }


def _scaling(file: GgufFile, field: Callable[..., Any]) -> dict[str, Any] | None:
    """Return the scaling of the rotary frequencies: a factor each (LLaMA 3.1 and later), or one for all."""
    if _ROPE_FACTORS in file.tensors:
        place = file.tensors[_ROPE_FACTORS]
        if place.type != _F32 or len(place.shape) != 1:
            raise ConfigError(f"{file.path}: tensor {_ROPE_FACTORS}: must be a vector of float32")
        factors = np.fromfile(file.path, "<f4", count=place.shape[0], offset=place.offset)
        return {"rope_type": "factors", "factors": factors.tolist()}
    if (kind := field("rope.scaling.type", "none")) not in ("none", "linear"):
        raise ConfigError(f"{file.path}: rope.scaling.type={kind!r} is not supported (supported: none, linear)")
    factor = field("rope.scaling.factor", field("rope.scale_linear", 1.0))
    return {"rope_type": "linear", "factor": factor} if kind == "linear" or factor != 1.0 else None


def _gemma3(field: Callable[..., Any]) -> dict[str, Any]:
    """Return what the file leaves to the program: llama.cpp has the pattern of windows, and theta within them."""
    is_27b = field("block_count") == _LAYERS_OF_27B
    heads, head_dim = field("attention.head_count"), field("attention.key_length")
    return {
        "sliding_window": field("attention.sliding_window"),
        "rope_local_base_freq": 10000.0,
        "query_pre_attn_scalar": field("embedding_length") // heads if is_27b else head_dim,
        "final_logit_softcapping": field("final_logit_softcapping", None),
    }


def _gpt2(field: Callable[..., Any]) -> dict[str, Any]:
    return {
        "n_embd": field("embedding_length"),
        "n_inner": field("feed_forward_length"),
        "n_layer": field("block_count"),
        "n_head": field("attention.head_count"),
        "n_positions": field("context_length"),
        "layer_norm_epsilon": field("attention.layer_norm_epsilon"),
    }
