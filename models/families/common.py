"""Helpers shared by the family readers: activations, rotary positions, layer kinds, experts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal

from ...conf.architecture import Architecture, LayerKind
from ...conf.errors import ConfigError, nearest
from ...conf.experts import ExpertsConfig
from ..model_config import ModelValues
from ..rotary_config import Rope, RopeKeys, read_rope

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]
_ACTIVATIONS: dict[str, Activation] = {
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
    "relu2": "relu2",
}
# Keys that do not affect the logits in transformers: metadata, training, sampling defaults, other heads.
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
    output_router_logits router_aux_loss_coef router_jitter_noise use_bfloat16 use_cache xla_device
    embedding_dropout residual_dropout
"""
HARMLESS = frozenset(_HARMLESS.split())
_ROPE = RopeKeys()


def activation(config: ModelValues, key: str, default: str) -> Activation:
    """Read the activation function of the feed-forward block."""
    name = str(config.values.get(key, default))
    config.asked.add(key)
    if name not in _ACTIVATIONS:
        raise ConfigError(f"{config.path}: {key}={name}: not supported{nearest(name, _ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def only(config: ModelValues, fixed: Mapping[str, Any]) -> None:
    """Check that each key is missing or has the only supported value."""
    for key, value in fixed.items():
        if config.get(key, value) != value:
            raise config.unsupported(f"{key}={config.get(key)}")


def all_biases(value: Any) -> dict[str, Any]:
    """Return the fields of `Architecture` for the biases of all linear layers, each with this value."""
    return dict.fromkeys(("qkv_bias", "attention_out_bias", "ffn_bias"), value)


def attention_biases(config: ModelValues, key: str = "attention_bias", *, default: bool = False) -> dict[str, Any]:
    """Read the key that gives all attention projections a bias, or none."""
    return dict.fromkeys(("qkv_bias", "attention_out_bias"), config.flag(key, default))


def rotary_decoder(
    config: ModelValues,
    *,
    default_max: int,
    default_heads: int | None = None,
    default_head_dim: int | None = None,
    rope: RopeKeys = _ROPE,
    eps: tuple[str, float] = ("rms_norm_eps", 1e-6),
    act: tuple[str, str] = ("hidden_act", "silu"),
    tied: bool = False,
    sizes: Mapping[str, int] | None = None,
) -> Architecture:
    """Read the part of an architecture that is common to models with rotary positions.

    Args:
        config: the model's config.
        default_heads: KV heads if the key is missing. None here, or null in the config: as many as query heads.
        default_head_dim: head size if the key is missing; None: hidden_size / num_attention_heads.
        default_max: `max_position_embeddings` if the key is missing.
        rope: how the config specifies rotary positions.
        eps: the key of the norms' epsilon, and its default.
        act: the key of the activation function, and its default.
        tied: the default of `tie_word_embeddings`.
        sizes: defaults of keys for which most families have none.
    """
    sizes = sizes or {}

    def size(key: str) -> int:
        return config.positive(key, sizes.get(key))

    hidden, heads = size("hidden_size"), size("num_attention_heads")
    head_dim = config.positive_or_null("head_dim", default_head_dim) or hidden // heads
    if head_dim % 2 or not head_dim:
        raise ConfigError(f"{config.path}: head_dim={head_dim}: must be even, because RoPE rotates pairs")
    vocab = vocabulary(config, sizes.get("vocab_size"))
    max_position = config.positive("max_position_embeddings", default_max)
    kv_heads = config.positive_or_null("num_key_value_heads", default_heads) or heads
    if heads % kv_heads:
        raise ConfigError(f"{config.path}: num_key_value_heads={kv_heads}: must divide num_attention_heads={heads}")
    found = read_rope(config, rope, max_position=max_position)
    scaling, turned = found.scaling, _turned(config, rope, found, head_dim)
    if scaling is not None and scaling.type == "yarn":
        max_position = max(max_position, int(scaling.original_max_position * scaling.factor))
    return Architecture(
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=size("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_size=size("intermediate_size"),
        max_position=max_position,
        norm_eps=config.number(*eps),
        rope_theta=found.theta,
        rope_scaling=scaling,
        rotary_dim=None if turned == head_dim else turned,
        activation=activation(config, *act),
        tie_embeddings=config.flag("tie_word_embeddings", tied),
    )


def vocabulary(config: ModelValues, default: int | None = None) -> int:
    """Read the size of the vocabulary, which has the padding token in it."""
    size, pad = config.positive("vocab_size", default), config.token("pad_token_id")
    if pad is not None and not -size <= pad < size:
        raise config.wrong("pad_token_id", f"null or below vocab_size={size}")
    return size


def _turned(config: ModelValues, keys: RopeKeys, rope: Rope, head_dim: int) -> int:
    """Return the rotary elements of a head: an even number, with a LongRoPE factor for each pair."""
    turned = int(head_dim * rope.turned)
    of_head = f"of the {head_dim} elements of a head (hidden_size / num_attention_heads)"
    if turned < 2 or turned % 2:
        raise ConfigError(f"{config.path}: {keys.turned}={rope.turned:g}: must rotate an even number {of_head}")
    if (scaling := rope.scaling) is not None and scaling.type == "longrope":
        for name, factors in (("long_factor", scaling.factors), ("short_factor", scaling.short_factors)):
            if len(factors) != turned // 2:
                right = f"{turned // 2} numbers, one per pair: {keys.turned} rotates {turned} {of_head}"
                raise ConfigError(f"{config.path}: {name}: must have {right}")
    return turned


def by_layer(config: ModelValues, count: int, window: int | None, slides: Callable[[int], bool]) -> list[int | None]:
    """Return each layer's window; None: full attention.

    Args:
        config: the values of config.json; its `layer_types` take precedence.
        count: number of layers.
        window: window size of sliding-attention layers.
        slides: whether the layer at an index has sliding attention, used without `layer_types`.
    """
    named = config.names("layer_types")
    if config.get("layer_types") is None:
        named = ["sliding_attention" if slides(i) else "full_attention" for i in range(count)]
    if len(named) != count:
        raise ConfigError(f"{config.path}: layer_types: must have as many entries as num_hidden_layers")
    for each in named:
        if each not in ("full_attention", "sliding_attention"):
            raise config.unsupported(f"layer_types with {each}")
    if "sliding_attention" in named and window is None:
        raise config.unsupported(f"layer_types with sliding_attention and sliding_window={window}")
    return [window if each == "sliding_attention" else None for each in named]


def windows(
    config: ModelValues,
    arch: Architecture,
    window: int | None,
    slides: Callable[[int], bool],
    *,
    full_turns: bool = True,
) -> Architecture:
    """Return the architecture with the window of each layer.

    Args:
        config: as in `by_layer`.
        arch: the architecture read so far.
        window: as in `by_layer`.
        slides: as in `by_layer`.
        full_turns: full-attention layers have rotary positions too.
    """
    found = by_layer(config, arch.num_layers, window, slides)
    one = arch.kind(0)
    return with_layers(arch, (replace(one, window=each, rope=full_turns or each is not None) for each in found))


def with_layers(arch: Architecture, kinds: Iterable[LayerKind]) -> Architecture:
    """Return the architecture with these layer kinds: one value for all layers if they are alike."""
    found = tuple(kinds)
    if len(set(found)) > 1 or not found[0].rope:
        return replace(arch, layers=found)
    one = found[0]
    return replace(arch, sliding_window=one.window, rope_theta=one.rope_theta, rope_scaling=one.rope_scaling)


def without_ropes(config: ModelValues) -> ModelValues:
    """Return the values without the RoPE keys. Keys read from the result count as read from `config`."""
    own = ModelValues(config.path, {k: v for k, v in config.values.items() if not k.startswith("rope_")})
    own.asked = config.asked
    return own


def ropes_by_kind(config: ModelValues) -> tuple[ModelValues, ModelValues]:
    """Return the RoPE parameters of full-attention and of sliding-attention layers."""
    by_kind, old = config.part("rope_parameters"), config.part("rope_scaling")
    full, sliding = (by_kind.part(kind) for kind in ("full_attention", "sliding_attention"))
    by_kind.refuse_others(())
    full.values = (full.values or {"rope_type": "default"}) | old.values
    return full, sliding


def layers_with_ropes(arch: Architecture, found: Iterable[int | None], full: Rope, sliding: Rope) -> Architecture:
    """Return the architecture for layers with these windows: RoPE is `sliding` with a window, `full` without."""
    kinds = [(window, full if window is None else sliding) for window in found]
    return with_layers(
        arch, (LayerKind(window=w, rope_theta=rope.theta, rope_scaling=rope.scaling) for w, rope in kinds)
    )


def experts(
    config: ModelValues,
    keys: tuple[str, str] | None = None,
    /,
    *,
    default: int,
    default_picked: int | None,
    **rule: Any,
) -> ExpertsConfig:
    """Read the MoE config.

    Args:
        config: the model's config.
        keys: the family's own keys for the number of experts and the top-k.
        default: number of experts if the key is missing.
        default_picked: experts per token (top-k) if the key is missing.
        rule: the other fields of `ExpertsConfig`.
    """
    if activation(config, "hidden_act", "silu") != "silu":
        raise config.unsupported(f"hidden_act={config.get('hidden_act')} in a model of experts")
    key, key_picked = keys or (
        config.first("num_experts", "n_routed_experts", "num_local_experts"),
        "num_experts_per_tok",
    )
    picked = config.positive(key_picked, default_picked)
    try:
        return ExpertsConfig(num_experts=config.positive(key, default), experts_per_token=picked, **rule)
    except ConfigError as error:
        named = (key, key_picked, *(name for name in ("n_group", "topk_group") if name in config.asked))
        raise ConfigError(f"{config.path}: {error} ({', '.join(named)})") from error


def experts_in_groups(
    config: ModelValues, *, default: int, default_picked: int | None, normalized: bool, width: int, shared: int
) -> ExpertsConfig:
    """Read the MoE config with DeepSeek V3 routing: sigmoid scores, correction bias, group-limited top-k.

    Args:
        config: the model's config.
        default: as in `experts`.
        default_picked: as in `experts`.
        normalized: the default of `norm_topk_prob`.
        width: intermediate size of an expert.
        shared: intermediate size of the shared expert.
    """
    return experts(
        config,
        default=default,
        default_picked=default_picked,
        scores="sigmoid",
        correction_bias=True,
        groups=config.positive("n_group", 1),
        top_groups=config.positive("topk_group", 1),
        group_score="two_highest",
        normalized=config.flag("norm_topk_prob", normalized),
        scale=config.number("routed_scaling_factor", 1.0),
        ffn_size=width,
        shared_ffn_size=shared,
        router_float32=True,
    )


def layers_of_experts(arch: Architecture, has_experts: Callable[[int], bool]) -> Architecture:
    """Return the architecture with its dense layers marked, if there are any.

    Args:
        arch: the architecture, with its experts and windows.
        has_experts: whether the layer at an index has experts.
    """
    flags = [has_experts(i) for i in range(arch.num_layers)]
    if all(flags):
        return arch
    return replace(arch, layers=tuple(replace(arch.kind(i), experts=flag) for i, flag in enumerate(flags)))
