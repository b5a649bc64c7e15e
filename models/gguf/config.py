"""Translates the fields of a GGUF file into those of a Hugging Face `config.json`. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ...conf.errors import ConfigError
from .file import GgufFile

_ROPE_FACTORS = "rope_freqs.weight"
_LONG_FACTORS = {"long_factor": "rope_factors_long.weight", "short_factor": "rope_factors_short.weight"}
_F32 = 0
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}  # of the model that scales scores by another width
_NAMES = {
    "llama": "LlamaForCausalLM",  # Mistral and SmolLM too
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "granite": "GraniteForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "stablelm": "StableLmForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "falcon": "FalconForCausalLM",
    "glm4moe": "Glm4MoeForCausalLM",
    "minimax-m2": "MiniMaxM2ForCausalLM",
}
_ALWAYS_EXPERTS = ("qwen2moe", "qwen3moe", "glm4moe", "minimax-m2")
OF_EXPERTS = {"llama": "MixtralForCausalLM", **{name: _NAMES[name] for name in _ALWAYS_EXPERTS}}
_PARTLY_TURNED = ("phi3", "stablelm", "glm4", "glm4moe", "minimax-m2")
_LAYER_NORM = ("stablelm", "falcon")
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
        "architectures": [OF_EXPERTS[name] if file.get(f"{name}.expert_count", 0) else _NAMES[name]],
        "vocab_size": _shape(file, "token_embd.weight")[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(dict.fromkeys(end for end in ends if end is not None)),
    }
    if name == "gpt2":
        return common | _gpt2(field)
    values = common | _rotary(file, name, field)
    if file.get(f"{name}.expert_count", 0):
        values |= _experts(name, field)
    return values | (_OWN[name](file, field) if name in _OWN else {})


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
    if file.get(f"{name}.expert_count", 0) and name not in OF_EXPERTS:
        known = ", ".join(OF_EXPERTS)
        raise ConfigError(f"{file.path}: {name}.expert_count: experts are read of general.architecture {known} only")
    if name == "olmo2" and file.get("olmo2.attention.sliding_window"):
        raise ConfigError(f"{file.path}: olmo2.attention.sliding_window (OLMo 3) is not supported")
    return str(name)


def _shape(file: GgufFile, name: str) -> tuple[int, ...]:
    if name not in file.tensors:
        raise ConfigError(f"{file.path}: tensor {name} is missing")
    return file.tensors[name].shape


def _rotary(file: GgufFile, name: str, field: Callable[..., Any]) -> dict[str, Any]:
    hidden, heads = field("embedding_length"), field("attention.head_count")
    head_dim = field("attention.key_length", hidden // heads if heads else hidden)
    turned = field("rope.dimension_count", head_dim)
    if turned != head_dim and name not in _PARTLY_TURNED:
        raise ConfigError(f"{file.path}: rope.dimension_count={turned}: must be the size of a head, {head_dim}")
    return {
        "hidden_size": hidden,
        "intermediate_size": field("feed_forward_length"),
        "num_hidden_layers": field("block_count") - field("nextn_predict_layers", 0),
        "num_attention_heads": heads,
        "num_key_value_heads": field("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": field("context_length"),
        "rms_norm_eps": field("attention.layer_norm_rms_epsilon", *([None] if name in _LAYER_NORM else [])),
        "partial_rotary_factor": (turned + 0.5) / head_dim if turned < head_dim else 1.0,  # readers take the floor
        "rope_theta": field("rope.freq_base", 10000.0),
        "rope_scaling": _scaling(file, field),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in file.tensors,
    }


def _scaling(file: GgufFile, field: Callable[..., Any]) -> dict[str, Any] | None:
    """Return the scaling of the rotary frequencies: a factor each (LLaMA 3.1 and later), or one for all."""
    if _ROPE_FACTORS in file.tensors:
        return {"rope_type": "factors", "factors": _vector(file, _ROPE_FACTORS)}
    if _LONG_FACTORS["long_factor"] in file.tensors:
        factors: dict[str, Any] = {key: _vector(file, tensor) for key, tensor in _LONG_FACTORS.items()}
        grown = field("rope.scaling.attn_factor", None)
        return {"rope_type": "longrope"} | factors | ({} if grown is None else {"attention_factor": grown})
    if (kind := field("rope.scaling.type", "none")) not in ("none", "linear"):
        raise ConfigError(f"{file.path}: rope.scaling.type={kind!r} is not supported (supported: none, linear)")
    factor = field("rope.scaling.factor", field("rope.scale_linear", 1.0))
    return {"rope_type": "linear", "factor": factor} if kind == "linear" or factor != 1.0 else None


def _vector(file: GgufFile, name: str) -> list[float]:
    """Return the numbers of a tensor that says how positions turn."""
    _shape(file, name)
    place = file.tensors[name]
    if place.type != _F32 or len(place.shape) != 1:
        raise ConfigError(f"{file.path}: tensor {name}: must be a vector of float32")
    found: list[float] = np.fromfile(file.path, "<f4", count=place.shape[0], offset=place.offset).tolist()
    return found


def _experts(name: str, field: Callable[..., Any]) -> dict[str, Any]:
    """Return what is said of experts; llama.cpp itself has whether their scores are normalized."""
    return {
        "num_experts": field("expert_count"),
        "num_experts_per_tok": field("expert_used_count"),
        "moe_intermediate_size": field("expert_feed_forward_length", field("feed_forward_length")),
        "shared_expert_intermediate_size": field("expert_shared_feed_forward_length", field("feed_forward_length")),
        "norm_topk_prob": field("expert_weights_norm", name != "qwen2moe"),
    }


def _glm4_moe(file: GgufFile, field: Callable[..., Any]) -> dict[str, Any]:
    return {
        "n_shared_experts": field("expert_shared_count"),
        "first_k_dense_replace": field("leading_dense_block_count"),
        "routed_scaling_factor": field("expert_weights_scale"),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
    }


def _gemma(file: GgufFile, field: Callable[..., Any]) -> dict[str, Any]:
    """Return what the file leaves to the program: llama.cpp has the pattern of windows, and theta within them."""
    name = file.get("general.architecture")
    heads, head_dim = field("attention.head_count"), field("attention.key_length")
    is_27b, is_second = field("block_count") == _LAYERS_OF_27B[name], name == "gemma2"
    return {
        "sliding_window": field("attention.sliding_window"),
        "rope_local_base_freq": 10000.0,
        "query_pre_attn_scalar": field("embedding_length") // heads if is_27b else head_dim,
        "attn_logit_softcapping": field("attn_logit_softcapping", 50.0 if is_second else None),
        "final_logit_softcapping": field("final_logit_softcapping", 30.0 if is_second else None),
    }


def _phi3(file: GgufFile, field: Callable[..., Any]) -> dict[str, Any]:
    length = field("rope.scaling.original_context_length", field("context_length"))
    window = field("attention.sliding_window", 0)
    return {"original_max_position_embeddings": length, "sliding_window": window or None}


def _granite(file: GgufFile, field: Callable[..., Any]) -> dict[str, Any]:
    head_dim = field("embedding_length") // field("attention.head_count")
    return {
        "embedding_multiplier": field("embedding_scale", 1.0),
        "residual_multiplier": field("residual_scale", 1.0),
        "attention_multiplier": field("attention.scale", head_dim**-0.5),
        "logits_scaling": field("logit_scale", 1.0),
    }


def _stablelm(file: GgufFile, field: Callable[..., Any]) -> dict[str, Any]:
    return {
        "layer_norm_eps": field("attention.layer_norm_epsilon"),
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in file.tensors,
        "use_qkv_bias": "blk.0.attn_q.bias" in file.tensors,
        "qk_layernorm": "blk.0.attn_q_norm.weight" in file.tensors,
    }


def _falcon(file: GgufFile, field: Callable[..., Any]) -> dict[str, Any]:
    heads = field("attention.head_count")
    kv_heads, has_two = field("attention.head_count_kv", heads), "blk.0.attn_norm_2.weight" in file.tensors
    return {
        "layer_norm_epsilon": field("attention.layer_norm_epsilon"),
        "ffn_hidden_size": field("feed_forward_length"),
        "num_kv_heads": kv_heads,
        "new_decoder_architecture": has_two or kv_heads not in (1, heads),
        "num_ln_in_parallel_attn": 2 if has_two else 1,
        "multi_query": kv_heads == 1,
        "bias": "blk.0.attn_qkv.bias" in file.tensors,
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


_OWN: dict[str, Callable[[GgufFile, Callable[..., Any]], dict[str, Any]]] = {
    "gemma2": _gemma,
    "gemma3": _gemma,
    "phi3": _phi3,
    "granite": _granite,
    "stablelm": _stablelm,
    "falcon": _falcon,
    "glm4moe": _glm4_moe,
}
