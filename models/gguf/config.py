"""Translates GGUF fields into Hugging Face `config.json` keys. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ...conf.errors import ConfigError
from .file import GgufFile

_ROPE_FACTORS = "rope_freqs.weight"
_LONG_FACTORS = {"long_factor": "rope_factors_long.weight", "short_factor": "rope_factors_short.weight"}
_F32 = 0
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}  # only the 27B models scale scores by hidden_size / heads
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
    "olmo2": "Olmo2ForCausalLM",  # OLMo 3 too
    "granite": "GraniteForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "stablelm": "StableLmForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "falcon": "FalconForCausalLM",
    "glm4moe": "Glm4MoeForCausalLM",
    "minimax-m2": "MiniMaxM2ForCausalLM",
    "mistral3": "MistralForCausalLM",
    "chatglm": "GlmForCausalLM",
    "gptneox": "GPTNeoXForCausalLM",
    "internlm2": "InternLM2ForCausalLM",
    "minicpm": "MiniCPMForCausalLM",
    "deepseek2": "DeepseekV2ForCausalLM",  # V3 and Kimi K2 too
    "gpt-oss": "GptOssForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "ernie4_5-moe": "Ernie4_5_MoeForCausalLM",
    "command-r": "CohereForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "nemotron": "NemotronForCausalLM",
    "olmo": "OlmoForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "arcee": "ArceeForCausalLM",
    "dots1": "Dots1ForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "phi2": "PhiForCausalLM",
}
_ALWAYS_EXPERTS = (
    *("qwen2moe", "qwen3moe", "glm4moe", "minimax-m2", "deepseek2", "gpt-oss", "ernie4_5-moe", "olmoe", "dots1"),
    "granitemoe",
)
OF_EXPERTS = {"llama": "MixtralForCausalLM", **{name: _NAMES[name] for name in _ALWAYS_EXPERTS}}
_NOT_NORMALIZED = ("qwen2moe", "olmoe", "deepseek2", "dots1")  # default of expert_weights_norm is false
_SIGMOID = 2  # value of expert_gating_func
_PARTLY_TURNED = ("phi3", "stablelm", "glm4", "glm4moe", "minimax-m2", "chatglm", "gptneox", "nemotron", "phi2")
_LAYER_NORM = ("stablelm", "falcon", "gptneox", "command-r", "cohere2", "starcoder2", "nemotron", "olmo", "phi2")
_EPS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
_END_TOKENS = ("eos", "eot", "eom")  # end of text, turn and message
# GGUF field by config key, some with a default; with the default None, the field may be missing.
_Fields = dict[str, str | tuple[str, Any]]
_OF_EXPERT_FIELDS: _Fields = {
    "num_experts": "expert_count",
    "n_routed_experts": "expert_count",
    "moe_num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_k": "expert_used_count",
    "n_shared_experts": ("expert_shared_count", None),
    "moe_num_shared_experts": ("expert_shared_count", 0),
    "n_group": ("expert_group_count", 1),
    "topk_group": ("expert_group_used_count", 1),
    "first_k_dense_replace": ("leading_dense_block_count", 0),
    "moe_layer_start_index": ("leading_dense_block_count", 0),
    "moe_layer_interval": ("interleave_moe_layer_step", 1),
    "routed_scaling_factor": ("expert_weights_scale", 1.0),
}
_OWN_FIELDS: dict[str, _Fields] = {
    "command-r": {"logit_scale": ("logit_scale", 1.0)},
    "cohere2": {"logit_scale": "logit_scale", "sliding_window": "attention.sliding_window"},
    "gpt-oss": {"intermediate_size": "expert_feed_forward_length", "sliding_window": "attention.sliding_window"},
    "gptneox": {"use_parallel_residual": ("use_parallel_residual", True)},
    "olmo": {"clip_qkv": ("attention.clamp_kqv", None)},
    "granite": {
        "embedding_multiplier": ("embedding_scale", 1.0),
        "residual_multiplier": ("residual_scale", 1.0),
        "logits_scaling": ("logit_scale", 1.0),
    },
}
_OWN_FIELDS["granitemoe"] = _OWN_FIELDS["granite"]


def config_values(file: GgufFile) -> dict[str, Any]:
    """Return the file's architecture as `config.json` values.

    Raises:
        ConfigError: the architecture or a feature of it is not supported, or a field is missing.
    """
    name = _supported(file)

    def field(key: str, *default: Any) -> Any:
        if (value := file.get(f"{name}.{key}", *default)) is None and not default:
            raise ConfigError(f"{file.path}: the field {name}.{key} is missing")
        return value

    ends = [file.get(f"tokenizer.ggml.{kind}_token_id") for kind in _END_TOKENS]
    has_experts = name in _ALWAYS_EXPERTS or file.get(f"{name}.expert_count", 0)
    common = {
        "architectures": [OF_EXPERTS[name] if has_experts else _NAMES[name]],
        "vocab_size": _shape(file, "token_embd.weight")[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(dict.fromkeys(end for end in ends if end is not None)),
    }
    if name == "gpt2":
        return common | _gpt2(field)
    values = common | _rotary(file, name, field)
    if has_experts:
        values |= _experts(file, name, field)
    values |= _values(field, _OWN_FIELDS.get(name, {}))
    return values | (_OWN[name](file, field) if name in _OWN else {})


def _values(field: Callable[..., Any], fields: _Fields) -> dict[str, Any]:
    return {key: field(of) if isinstance(of, str) else field(*of) for key, of in fields.items()}


def _supported(file: GgufFile) -> str:
    """Return the file's architecture name after checking that it is supported."""
    name = file.get("general.architecture")
    if name not in _NAMES:
        raise ConfigError(
            f"{file.path}: general.architecture={name!r} is not supported; supported: {', '.join(_NAMES)}"
        )
    if (kind := file.get("general.type", "model")) != "model":
        raise ConfigError(f"{file.path}: general.type={kind!r}: must be a model")
    if file.get(f"{name}.expert_count", 0) and name not in OF_EXPERTS:
        known = ", ".join(OF_EXPERTS)
        raise ConfigError(f"{file.path}: {name}.expert_count: no experts in this architecture; supported: {known}")
    if (scale := file.get(f"{name}.attention.temperature_scale", 0.0)) != 0.0:
        raise ConfigError(f"{file.path}: {name}.attention.temperature_scale={scale:g} is not supported")
    if "granite" in name and not file.get(f"{name}.rope.scaling.finetuned", True):
        raise ConfigError(f"{file.path}: {name}.rope.scaling.finetuned=false (no positions) is not supported")
    return str(name)


def _shape(file: GgufFile, name: str) -> tuple[int, ...]:
    if name not in file.tensors:
        raise ConfigError(f"{file.path}: tensor {name} is missing")
    return file.tensors[name].shape


def _rotary(file: GgufFile, name: str, field: Callable[..., Any]) -> dict[str, Any]:
    hidden, heads = field("embedding_length"), field("attention.head_count")
    head_dim = field("attention.key_length", hidden // heads if heads else hidden)
    turned = field("rope.dimension_count", head_dim)
    if name == "deepseek2":
        head_dim = turned  # MLA: the other dimensions come from the compressed KV
    if turned != head_dim and name not in _PARTLY_TURNED:
        raise ConfigError(f"{file.path}: rope.dimension_count={turned}: must be the size of a head, {head_dim}")
    share = (turned + 0.5) / head_dim if turned < head_dim else 1.0  # readers take the floor
    theta, num_layers = field("rope.freq_base", 10000.0), field("block_count") - field("nextn_predict_layers", 0)
    eps = field(f"attention.layer_norm_{'' if name in _LAYER_NORM else 'rms_'}epsilon")
    has_bias = {of: f"blk.0.{of}.bias" in file.tensors for of in ("attn_q", "attn_qkv", "attn_output", "ffn_down")}
    qkv_bias, qk_norm = has_bias["attn_q"] or has_bias["attn_qkv"], "blk.0.attn_q_norm.weight" in file.tensors
    return {
        "hidden_size": hidden,
        "intermediate_size": field("feed_forward_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": field("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": field("context_length"),
        **dict.fromkeys(_EPS, eps),
        **dict.fromkeys(("partial_rotary_factor", "rotary_pct"), share),
        **dict.fromkeys(("rope_theta", "rotary_emb_base"), theta),
        "rope_scaling": _scaling(file, field),
        **dict.fromkeys(("attention_bias", "use_qkv_bias", "use_bias", "bias"), qkv_bias),
        "attention_out_bias": has_bias["attn_output"],
        "mlp_bias": has_bias["ffn_down"],
        **dict.fromkeys(("use_qk_norm", "qk_layernorm"), qk_norm),
        "sliding_window": field("attention.sliding_window", None) or None,
        **_layer_types(field("attention.sliding_window_pattern", None), num_layers),
    }


def _layer_types(pattern: int | list[bool] | None, num_layers: int) -> dict[str, Any]:
    """Return which layers have a window. `pattern`: all but every n-th, or one flag per layer; None: not given."""
    if pattern is None:
        return {}
    if isinstance(pattern, int):
        pattern = [pattern == 0 or i % pattern < pattern - 1 for i in range(num_layers)]
    return {"layer_types": ["sliding_attention" if flag else "full_attention" for flag in pattern[:num_layers]]}


def _scaling(file: GgufFile, field: Callable[..., Any]) -> dict[str, Any]:
    """Return the RoPE scaling: a factor per frequency (LLaMA 3.1 and later), LongRoPE, YaRN, linear or none."""
    if _ROPE_FACTORS in file.tensors:
        return {"rope_type": "factors", "factors": _vector(file, _ROPE_FACTORS)}
    if _LONG_FACTORS["long_factor"] in file.tensors:
        factors: dict[str, Any] = {key: _vector(file, tensor) for key, tensor in _LONG_FACTORS.items()}
        grown = field("rope.scaling.attn_factor", None)
        return {"rope_type": "longrope"} | factors | ({} if grown is None else {"attention_factor": grown})
    if (kind := field("rope.scaling.type", "none")) not in ("none", "linear", "yarn"):
        raise ConfigError(f"{file.path}: rope.scaling.type={kind!r} is not supported (supported: none, linear, yarn)")
    factor = field("rope.scaling.factor", field("rope.scale_linear", 1.0))
    if kind == "yarn":
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": field("rope.scaling.original_context_length", field("context_length")),
            "beta_fast": field("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": field("rope.scaling.yarn_beta_slow", 1.0),
            "attention_factor": field("rope.scaling.yarn_attn_factor", None),
            "mscale": 1.0,
            "mscale_all_dim": field("rope.scaling.yarn_log_multiplier", 0.0),
        }
    return {"rope_type": "linear", "factor": factor} if kind == "linear" or factor != 1.0 else {"rope_type": "default"}


def _vector(file: GgufFile, name: str) -> list[float]:
    """Read a tensor of RoPE frequency factors."""
    _shape(file, name)
    place = file.tensors[name]
    if place.type != _F32 or len(place.shape) != 1:
        raise ConfigError(f"{place.path}: tensor {name}: must be a vector of float32")
    found: list[float] = np.fromfile(place.path, "<f4", count=place.shape[0], offset=place.offset).tolist()
    return found


def _experts(file: GgufFile, name: str, field: Callable[..., Any]) -> dict[str, Any]:
    """Return the MoE keys; llama.cpp hard-codes the defaults of score normalization."""
    scores = field("expert_gating_func", 0)
    if name in ("dots1", "glm4moe", "minimax-m2") and scores not in (0, _SIGMOID):
        raise ConfigError(f"{file.path}: {name}.expert_gating_func={scores} is not supported (supported: {_SIGMOID})")
    return _values(field, _OF_EXPERT_FIELDS) | {
        "moe_intermediate_size": field("expert_feed_forward_length", field("feed_forward_length")),
        "shared_expert_intermediate_size": field("expert_shared_feed_forward_length", field("feed_forward_length")),
        "norm_topk_prob": field("expert_weights_norm", name not in _NOT_NORMALIZED),
    }


def _deepseek(file: GgufFile, field: Callable[..., Any]) -> dict[str, Any]:
    """Return the MLA keys. Older files, with one tensor `attn_kv_b`, have full widths in `attention.key_length`."""
    turned, scaling = field("rope.dimension_count"), _scaling(file, field)
    width = field("attention.key_length_mla", field("attention.key_length"))
    if scaling["rope_type"] == "yarn":  # the file stores 0.1 times the checkpoint's value
        grown = field("rope.scaling.yarn_log_multiplier") / 0.1
        scaling |= {"mscale": grown, "mscale_all_dim": grown}
    is_third = field("expert_gating_func", 0) == _SIGMOID
    return {
        "architectures": ["DeepseekV3ForCausalLM" if is_third else "DeepseekV2ForCausalLM"],
        "topk_method": "noaux_tc" if is_third else "group_limited_greedy",
        "num_key_value_heads": field("attention.head_count"),
        "kv_lora_rank": field("attention.kv_lora_rank"),
        "q_lora_rank": field("attention.q_lora_rank", None),
        "qk_nope_head_dim": width - turned,
        "qk_rope_head_dim": turned,
        "v_head_dim": field("attention.value_length_mla", field("attention.value_length")),
        "rope_scaling": scaling,
    }


def _olmo2(file: GgufFile, field: Callable[..., Any]) -> dict[str, Any]:
    if not field("attention.sliding_window", 0):
        return {}
    theta = field("rope.freq_base_swa", field("rope.freq_base", 10000.0))
    return {
        "architectures": ["Olmo3ForCausalLM"],
        "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": theta}},
    }


def _gemma(file: GgufFile, field: Callable[..., Any]) -> dict[str, Any]:
    """Return the Gemma keys, with llama.cpp's hard-coded values for those that a file may omit."""
    name = file.get("general.architecture")
    heads, head_dim = field("attention.head_count"), field("attention.key_length")
    is_27b, is_second = field("block_count") == _LAYERS_OF_27B[name], name == "gemma2"
    return {
        "sliding_window": field("attention.sliding_window"),
        "rope_local_base_freq": field("rope.freq_base_swa", 10000.0),
        "query_pre_attn_scalar": field("embedding_length") // heads if is_27b else head_dim,
        "attn_logit_softcapping": field("attn_logit_softcapping", 50.0 if is_second else None),
        "final_logit_softcapping": field("final_logit_softcapping", 30.0 if is_second else None),
    }


def _phi3(file: GgufFile, field: Callable[..., Any]) -> dict[str, Any]:
    length = field("rope.scaling.original_context_length", field("context_length"))
    return {"original_max_position_embeddings": length}


def _granite(file: GgufFile, field: Callable[..., Any]) -> dict[str, Any]:
    head_dim = field("embedding_length") // field("attention.head_count")
    return {"attention_multiplier": field("attention.scale", head_dim**-0.5)}


def _minicpm(file: GgufFile, field: Callable[..., Any]) -> dict[str, Any]:
    return {
        "scale_emb": field("embedding_scale", 12.0),
        "scale_depth": field("residual_scale", 1.4 / field("block_count") ** 0.5) * field("block_count") ** 0.5,
        "dim_model_base": field("embedding_length") / field("logit_scale", field("embedding_length") / 256),
    }


def _exaone4(file: GgufFile, field: Callable[..., Any]) -> dict[str, Any]:
    return {"sliding_window": field("attention.sliding_window", 4096 if field("block_count") == 64 else None) or None}


def _falcon(file: GgufFile, field: Callable[..., Any]) -> dict[str, Any]:
    heads = field("attention.head_count")
    kv_heads, has_two = field("attention.head_count_kv", heads), "blk.0.attn_norm_2.weight" in file.tensors
    return {
        "ffn_hidden_size": field("feed_forward_length"),
        "num_kv_heads": kv_heads,
        "new_decoder_architecture": has_two or kv_heads not in (1, heads),
        "num_ln_in_parallel_attn": 2 if has_two else 1,
        "multi_query": kv_heads == 1,
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
    "granitemoe": _granite,
    "stablelm": lambda file, field: {"use_parallel_residual": "blk.0.ffn_norm.weight" not in file.tensors},
    "falcon": _falcon,
    "gptneox": lambda file, field: {"hidden_act": "gelu_new"},  # as llama.cpp computes
    "minicpm": _minicpm,
    "deepseek2": _deepseek,
    "exaone4": _exaone4,
    "olmo2": _olmo2,
}
