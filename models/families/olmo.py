"""OLMo 1, 2 and 3 (windows in three of four layers), OLMoE (MoE), and EXAONE 4.

Like OLMo 2, EXAONE 4 has norms after attention and feed-forward. If some layers have windows, the others have no
positions.
"""

from __future__ import annotations

from dataclasses import replace

from ...conf.architecture import Architecture
from ..model_config import ModelValues
from ..names import LLAMA
from ..rotary_config import RopeKeys, read_scaling
from .common import (
    attention_biases,
    by_layer,
    experts,
    layers_with_ropes,
    ropes_by_kind,
    rotary_decoder,
    windows,
    without_ropes,
)
from .family import KEYS, Family

_THETA = 500000.0  # of OLMo 3


def _olmo(config: ModelValues) -> Architecture:
    _refuse_clip(config)
    return replace(
        rotary_decoder(config, default_max=2048),
        norm="layer_plain",
        norm_eps=1e-5,  # regardless of the config
        **attention_biases(config),
    )


def _refuse_clip(config: ModelValues) -> None:
    if config.get("clip_qkv") is not None:
        raise config.unsupported(f"clip_qkv={config.get('clip_qkv')}")


def _normed(config: ModelValues, default_max: int) -> Architecture:
    """Read the fields common to all but OLMo 1: QK norms over all heads together."""
    return replace(
        rotary_decoder(config, default_max=default_max, eps=("rms_norm_eps", 1e-5)),
        qk_norm=True,
        qk_norm_over="width",
        **attention_biases(config),
    )


def _olmo2(config: ModelValues) -> Architecture:
    return replace(_normed(config, 2048), norms="after")


def _olmo3(config: ModelValues) -> Architecture:
    arch = _olmo2(without_ropes(config))
    window = config.positive_or_null("sliding_window", 4096)
    found = by_layer(config, arch.num_layers, window, lambda i: (i + 1) % 4 != 0)
    thetas = config.number("rope_theta", _THETA), _THETA  # the config's theta is for full attention only
    full, sliding = (
        read_scaling(ModelValues(config.path, {}), rope, RopeKeys(default_theta=theta), max_position=arch.max_position)
        for rope, theta in zip(ropes_by_kind(config), thetas, strict=True)
    )
    return layers_with_ropes(arch, found, full, sliding)


def _olmoe(config: ModelValues) -> Architecture:
    _refuse_clip(config)
    rule = {"normalized": config.flag("norm_topk_prob", False)}
    return replace(_normed(config, 4096), experts=experts(config, default=64, default_picked=8, **rule))


OLMO = Family(
    name="olmo",
    readers={"olmo": ("OlmoForCausalLM", _olmo)},
)
OLMOE = Family(
    name="olmoe",
    readers={"olmoe": ("OlmoeForCausalLM", _olmoe)},
    keys=KEYS | {"experts.num_experts": "num_experts"},
)
NORMS_AFTER = replace(
    LLAMA,
    attention_norm="",
    attention_norm_after="post_attention_layernorm",
    ffn_norm="",
    ffn_norm_after="post_feedforward_layernorm",
)
OLMO2 = Family(
    name="olmo2",
    readers={"olmo2": ("Olmo2ForCausalLM", _olmo2), "olmo3": ("Olmo3ForCausalLM", _olmo3)},
    names=NORMS_AFTER,
)


def _exaone4(config: ModelValues) -> Architecture:
    config.positive("num_key_value_heads", 32)  # null is not allowed
    arch = rotary_decoder(config, default_heads=32, default_max=2048, eps=("rms_norm_eps", 1e-5))
    window = config.positive_or_null("sliding_window", 4096)
    pattern = config.get("sliding_window_pattern", 4)
    if not isinstance(pattern, str) or config.get("layer_types") is None:  # layer_types takes precedence
        pattern = config.positive_or_null("sliding_window_pattern", 4) or 4
    arch = replace(arch, norms="after", qk_norm=True)
    return windows(config, arch, window, lambda i: (i + 1) % pattern != 0, full_turns=window is None)


EXAONE4 = Family(
    name="exaone4",
    readers={"exaone4": ("Exaone4ForCausalLM", _exaone4)},
    names=NORMS_AFTER,
)
