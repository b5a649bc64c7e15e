"""Qwen 2, 2.5 and 3, dense and MoE."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...conf.architecture import Architecture
from ..model_config import ModelValues
from ..names import LLAMA
from .common import attention_biases, experts, layers_of_experts, rotary_decoder, windows
from .family import EXPERT_KEYS, Family


def _windows(config: ModelValues, arch: Architecture) -> Architecture:
    """Read which layers have a window: those in `layer_types`, else those from `max_window_layers` on."""
    window, first = config.positive_or_null("sliding_window", 4096), config.integer("max_window_layers", 28)
    if not config.flag("use_sliding_window", False):
        window = None
    return windows(config, arch, window, lambda i: window is not None and i >= first)


def _qwen2(config: ModelValues) -> Architecture:
    arch = rotary_decoder(config, default_heads=32, default_max=32768)
    return _windows(config, replace(arch, qkv_bias=True))


def _qwen3(config: ModelValues) -> Architecture:
    arch = rotary_decoder(config, default_heads=32, default_head_dim=128, default_max=32768)
    return _windows(config, replace(arch, **_normed(config)))


def _normed(config: ModelValues) -> dict[str, Any]:
    return {**attention_biases(config), "qk_norm": True}


def _qwen2_moe(config: ModelValues) -> Architecture:
    shared = config.positive("shared_expert_intermediate_size", 5632)
    rule = {
        "ffn_size": config.positive("moe_intermediate_size", 1408),
        "normalized": config.flag("norm_topk_prob", False),
        "shared_ffn_size": shared,
        "shared_gate": True,
    }
    arch = replace(
        rotary_decoder(config, default_heads=16, default_max=32768),
        qkv_bias=config.flag("qkv_bias", True),
        experts=experts(config, default=60, default_picked=4, **rule),
    )
    last, window = config.integer("max_window_layers", 28), _window_of_all(config)
    arch = windows(config, arch, window, lambda i: window is not None and i < last and i % 2 == 0)
    return _sparse(config, arch)


def _qwen3_moe(config: ModelValues) -> Architecture:
    rule = {
        "ffn_size": config.positive("moe_intermediate_size", 768),
        "normalized": config.flag("norm_topk_prob", False),
    }
    arch = replace(
        rotary_decoder(config, default_heads=4, default_max=32768),
        **_normed(config),
        experts=experts(config, default=128, default_picked=8, **rule),
    )
    config.get("max_window_layers")  # all layers have the window
    return _sparse(config, replace(arch, sliding_window=_window_of_all(config)))


def _window_of_all(config: ModelValues) -> int | None:
    """Read the window of all layers; some configs store 0 for none."""
    if config.flag("use_sliding_window", False):
        return config.positive_or_null("sliding_window", 4096)
    if config.get("sliding_window") is not None:
        config.integer("sliding_window")
    return None


def _sparse(config: ModelValues, arch: Architecture) -> Architecture:
    """Read which layers have experts: every n-th, except `mlp_only_layers`."""
    step, dense = config.positive("decoder_sparse_step", 1), config.get("mlp_only_layers", [])
    if not isinstance(dense, list) or not all(type(i) is int for i in dense):
        raise config.wrong("mlp_only_layers", "a list of layers")
    return layers_of_experts(arch, lambda i: i not in dense and (i + 1) % step == 0)


QWEN2 = Family(
    name="qwen2",
    readers={"qwen2": ("Qwen2ForCausalLM", _qwen2)},
)
QWEN3 = Family(
    name="qwen3",
    readers={"qwen3": ("Qwen3ForCausalLM", _qwen3)},
)
QWEN_MOE = Family(
    name="qwen-moe",
    readers={"qwen2_moe": ("Qwen2MoeForCausalLM", _qwen2_moe), "qwen3_moe": ("Qwen3MoeForCausalLM", _qwen3_moe)},
    names=replace(LLAMA, shared="mlp.shared_expert."),
    keys=EXPERT_KEYS
    | {
        "experts.num_experts": "num_experts",
        "experts.shared_ffn_size": "shared_expert_intermediate_size",
        "layers": "decoder_sparse_step or mlp_only_layers",
    },
)
