"""The model families that are computed: a reader of each one's config.json, by the rules of transformers 5.

A feature that this package does not compute exactly is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from ..conf.errors import ConfigError, nearest
from ..conf.experts import ExpertsConfig
from .model_config import ModelValues
from .rotary_config import read_rope

_ACTIVATIONS: dict[str, Literal["silu", "gelu", "gelu_tanh", "relu"]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_accurate": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
# What transformers ignores when it computes logits: notes, training, sampling defaults, other heads.
_HARMLESS = """
    _attn_implementation _attn_implementation_autoset _commit_hash _flash_attn_2_enabled _from_model_config
    _name_or_path _num_labels architectures attention_dropout attn_implementation attn_pdrop auto_map bad_words_ids
    begin_suppress_tokens bos_token cache_implementation chat_template chunk_size_feed_forward classifier_dropout
    custom_pipelines decoder_start_token_id diversity_penalty do_sample dtype early_stopping embd_pdrop
    encoder_no_repeat_ngram_size eos_token epsilon_cutoff eta_cutoff experts_implementation
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id gradient_checkpointing
    hidden_dropout id2label initializer_range is_decoder is_llama_config keys_to_ignore_at_inference label2id
    language length_penalty license max_length max_new_tokens max_sequence_length min_length model_max_length
    model_type n_ctx neftune_noise_alpha no_repeat_ngram_size num_beam_groups num_beams num_labels
    num_return_sequences output_attentions output_hidden_states output_past output_scores pad_token pad_token_id
    predict_special_tokens prefix pretraining_tp problem_type remove_invalid_values repetition_penalty resid_pdrop
    return_dict return_dict_in_generate sep_token_id seq_length summary_activation summary_first_dropout
    summary_proj_to_labels summary_type summary_use_proj suppress_tokens task_specific_params temperature
    tf_legacy_loss tokenizer_class tokenizer_model_max_length tokenizer_padding_side top_k top_p torch_dtype
    torchscript transformers.js_config transformers_version typical_p unk_token unsloth_fixed unsloth_version
    use_bfloat16 use_cache xla_device
"""
HARMLESS = frozenset(_HARMLESS.split())


def _activation(config: ModelValues, key: str, default: str) -> Literal["silu", "gelu", "gelu_tanh", "relu"]:
    name = str(config.values.get(key, default))
    config.asked.add(key)
    if name not in _ACTIVATIONS:
        raise ConfigError(f"{config.path}: {key}={name}: not supported{nearest(name, _ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _rotary(
    config: ModelValues,
    *,
    default_heads: int | None,
    default_head_dim: int | None,
    default_max: int,
    default_theta: float = 10000.0,
) -> dict[str, Any]:
    """Read the fields of an `Architecture` that LLaMA, Mistral and Qwen share."""
    hidden, heads = config.positive("hidden_size"), config.positive("num_attention_heads")
    head_dim = config.positive_or_null("head_dim", default_head_dim) or hidden // heads
    if head_dim % 2 or not head_dim:
        raise ConfigError(f"{config.path}: head_dim={head_dim}: must be even, for rotary positions turn pairs")
    vocab, pad = config.positive("vocab_size"), config.token("pad_token_id")
    if pad is not None and not -vocab <= pad < vocab:
        raise config.wrong("pad_token_id", f"null or below vocab_size={vocab}")
    max_position = config.positive("max_position_embeddings", default_max)
    kv_heads = config.positive_or_null("num_key_value_heads", default_heads) or heads
    if heads % kv_heads:
        raise ConfigError(f"{config.path}: num_key_value_heads={kv_heads}: must divide num_attention_heads={heads}")
    theta, scaling = read_rope(config, max_position=max_position, default_theta=default_theta)
    if scaling is not None and scaling.type == "yarn":
        max_position = max(max_position, int(scaling.original_max_position * scaling.factor))
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_layers": config.positive("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "ffn_size": config.positive("intermediate_size"),
        "max_position": max_position,
        "norm_eps": config.number("rms_norm_eps", 1e-6),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "activation": _activation(config, "hidden_act", "silu"),
        "tie_embeddings": config.flag("tie_word_embeddings", False),
    }


def _llama(config: ModelValues) -> dict[str, Any]:
    bias = config.flag("attention_bias", False)
    return {
        **_rotary(config, default_heads=None, default_head_dim=None, default_max=2048),
        "qkv_bias": bias,
        "attention_out_bias": bias,
        "ffn_bias": config.flag("mlp_bias", False),
    }


def _window(config: ModelValues, window: int | None, default: list[str]) -> int | None:
    """Return the sliding window of all layers, or None. Layers that mix full and sliding attention are refused.

    Args:
        config: its `layer_types` decide.
        window: of layers with sliding attention.
        default: the kind of each layer without `layer_types`.
    """
    kinds = config.names("layer_types") or default
    if len(kinds) != config.positive("num_hidden_layers"):
        raise ConfigError(f"{config.path}: layer_types: must have as many entries as num_hidden_layers")
    if set(kinds) == {"full_attention"}:
        return None
    if set(kinds) == {"sliding_attention"} and window is not None:
        return window
    of = "layer_types" if config.get("layer_types") else "use_sliding_window"
    found = ", ".join(sorted(set(kinds)))
    raise config.unsupported(f"{of} with {found} and sliding_window={window}: layers that differ, or lack a window,")


def _mistral(config: ModelValues) -> dict[str, Any]:
    window = config.positive_or_null("sliding_window", 4096)
    kind = "full_attention" if window is None else "sliding_attention"
    return {
        **_rotary(config, default_heads=8, default_head_dim=None, default_max=131072),
        "sliding_window": _window(config, window, [kind] * config.positive("num_hidden_layers")),
    }


def _qwen_window(config: ModelValues) -> int | None:
    window, first = config.positive_or_null("sliding_window", 4096), config.integer("max_window_layers", 28)
    if not config.flag("use_sliding_window", False):
        window = None
    layers = range(config.positive("num_hidden_layers"))
    slides = [window is not None and i >= first for i in layers]
    return _window(config, window, ["sliding_attention" if each else "full_attention" for each in slides])


def _experts(config: ModelValues, *, key: str, default: int, default_picked: int) -> ExpertsConfig:
    """Read the experts of a model in which every layer has some; `key` is that of their number."""
    if config.integer("decoder_sparse_step", 1) != 1 or config.get("mlp_only_layers"):
        raise config.unsupported("experts in some layers only (decoder_sparse_step, mlp_only_layers)")
    picked = config.positive("num_experts_per_tok", default_picked)
    try:
        return ExpertsConfig(num_experts=config.positive(key, default), experts_per_token=picked)
    except ConfigError as error:
        raise ConfigError(f"{config.path}: {error}") from error


def _mixtral(config: ModelValues) -> dict[str, Any]:
    return {
        **_rotary(config, default_heads=8, default_head_dim=None, default_max=131072, default_theta=1e6),
        "sliding_window": config.positive_or_null("sliding_window"),
        "experts": _experts(config, key="num_local_experts", default=8, default_picked=2),
    }


def _qwen2(config: ModelValues) -> dict[str, Any]:
    return {
        **_rotary(config, default_heads=32, default_head_dim=None, default_max=32768),
        "qkv_bias": True,
        "sliding_window": _qwen_window(config),
    }


def _qwen3(config: ModelValues) -> dict[str, Any]:
    bias = config.flag("attention_bias", False)
    return {
        **_rotary(config, default_heads=32, default_head_dim=128, default_max=32768),
        "qkv_bias": bias,
        "attention_out_bias": bias,
        "qk_norm": True,
        "sliding_window": _qwen_window(config),
    }


def _qwen2_moe(config: ModelValues) -> dict[str, Any]:
    experts = _experts(config, key="num_experts", default=60, default_picked=4)
    return {
        **_rotary(config, default_heads=16, default_head_dim=None, default_max=32768),
        "ffn_size": config.positive("moe_intermediate_size", 1408),
        "qkv_bias": config.flag("qkv_bias", True),
        "sliding_window": _qwen_window(config),
        "experts": replace(experts, shared_ffn_size=config.positive("shared_expert_intermediate_size", 5632)),
    }


def _qwen3_moe(config: ModelValues) -> dict[str, Any]:
    bias = config.flag("attention_bias", False)
    return {
        **_rotary(config, default_heads=4, default_head_dim=None, default_max=32768),
        "ffn_size": config.positive("moe_intermediate_size", 768),
        "qkv_bias": bias,
        "attention_out_bias": bias,
        "qk_norm": True,
        "sliding_window": _qwen_window(config),
        "experts": _experts(config, key="num_experts", default=128, default_picked=8),
    }


def _gpt2(config: ModelValues) -> dict[str, Any]:
    for key in ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention"):
        if config.flag(key, False):
            raise config.unsupported(f"{key}=true")
    if not config.flag("scale_attn_weights", True):
        raise config.unsupported("scale_attn_weights=false")
    head_key = config.first("num_attention_heads", "n_head")
    hidden, heads = config.positive(config.first("hidden_size", "n_embd"), 768), config.positive(head_key, 12)
    if hidden % heads:
        raise ConfigError(f"{config.path}: {head_key}={heads}: must divide n_embd={hidden}")
    return {
        "vocab_size": config.positive("vocab_size", 50257),
        "hidden_size": hidden,
        "num_layers": config.positive(config.first("num_hidden_layers", "n_layer"), 12),
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": hidden // heads,
        "ffn_size": config.positive_or_null("n_inner") or 4 * hidden,
        "max_position": config.positive(config.first("max_position_embeddings", "n_positions"), 1024),
        "norm": "layer",
        "norm_eps": config.number("layer_norm_epsilon", 1e-5),
        "position": "learned",
        "activation": _activation(config, "activation_function", "gelu_new"),
        "gated_ffn": False,
        "qkv_bias": True,
        "attention_out_bias": True,
        "ffn_bias": True,
        "tie_embeddings": config.flag("tie_word_embeddings", True),
    }


READERS: dict[str, Callable[[ModelValues], dict[str, Any]]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "GPT2LMHeadModel": _gpt2,
    "MixtralForCausalLM": _mixtral,
    "Qwen2MoeForCausalLM": _qwen2_moe,
    "Qwen3MoeForCausalLM": _qwen3_moe,
}
NAME_BY_MODEL_TYPE = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
NOT_MODELLED = {
    "DeepseekV2ForCausalLM": "multi-head latent attention",
    "DeepseekV3ForCausalLM": "multi-head latent attention",
    "GptOssForCausalLM": "layers that alternate between full and sliding attention",
}
