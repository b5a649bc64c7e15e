"""OLMo: 1 and 2, 3 with windows in three of four layers, and OLMoE of experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..model_config import ModelValues
from ..names import LLAMA
from ..rotary_config import RopeKeys, read_scaling
from .common import attention_biases, by_layer, experts, layers_with_ropes, ropes_by_kind, rotary, without_ropes
from .family import KEYS, Family

_THETA = 500000.0  # of OLMo 3


def _olmo(config: ModelValues) -> dict[str, Any]:
    _refuse_clip(config)
    return {
        **rotary(config, default_max=2048),
        "norm": "layer_plain",
        "norm_eps": 1e-5,  # whatever the file says
        **attention_biases(config),
    }


def _refuse_clip(config: ModelValues) -> None:
    if config.get("clip_qkv") is not None:
        raise config.unsupported(f"clip_qkv={config.get('clip_qkv')}")


def _normed(config: ModelValues, default_max: int) -> dict[str, Any]:
    """Read what all later than 1 share: norms of queries and keys over all heads together."""
    return {
        **rotary(config, default_max=default_max, eps=("rms_norm_eps", 1e-5)),
        "qk_norm": True,
        "qk_norm_over": "width",
        **attention_biases(config),
    }


def _olmo2(config: ModelValues) -> dict[str, Any]:
    return _normed(config, 2048) | {"norms": "after"}


def _olmo3(config: ModelValues) -> dict[str, Any]:
    fields = _olmo2(without_ropes(config))
    found = by_layer(
        config,
        fields["num_layers"],
        lambda i: "sliding_attention" if (i + 1) % 4 else "full_attention",
        config.positive_or_null("sliding_window", 4096),
    )
    thetas = config.number("rope_theta", _THETA), _THETA  # the file's is that of full attention alone
    full, sliding = (
        read_scaling(
            ModelValues(config.path, {}), rope, RopeKeys(default_theta=theta), max_position=fields["max_position"]
        )
        for rope, theta in zip(ropes_by_kind(config), thetas, strict=True)
    )
    return fields | layers_with_ropes(found, full, sliding)


def _olmoe(config: ModelValues) -> dict[str, Any]:
    _refuse_clip(config)
    rule = {"normalized": config.flag("norm_topk_prob", False)}
    return _normed(config, 4096) | {"experts": experts(config, default=64, default_picked=8, **rule)}


OLMO = Family(
    name="olmo",
    readers={"olmo": ("OlmoForCausalLM", _olmo)},
    about="OLMo 1B and 7B",
    refused="those that clip queries, keys and values (7B 0424)",
)
OLMOE = Family(
    name="olmoe",
    readers={"olmoe": ("OlmoeForCausalLM", _olmoe)},
    keys=KEYS | {"experts.num_experts": "num_experts"},
    about="OLMoE 1B-7B",
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
    about="OLMo 2 and 3",
)
