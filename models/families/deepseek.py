"""DeepSeek V2 and V3: MLA, experts after dense first layers; Kimi K2 is a V3 by another name.

dots.llm1: Qwen 3 attention, and DeepSeek V3 experts after dense first layers.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from ...conf.architecture import Architecture
from ...conf.latent import LatentConfig
from ..model_config import ModelValues
from ..names import LLAMA
from .common import attention_biases, experts, experts_in_groups, layers_of_experts, only, rotary_decoder, windows
from .family import EXPERT_KEYS, Family

# Keys for training and MTP layers, and one that is the sum of two others.
_UNUSED = ("aux_loss_alpha", "seq_aux", "ep_size", "num_mtp_layers", "num_nextn_predict_layers", "qk_head_dim")


def _deepseek_v2(config: ModelValues) -> Architecture:
    config.asked |= {"topk_method", "n_group", "topk_group"}
    method = config.values.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise config.wrong("topk_method", "greedy or group_limited_greedy")
    for key in ("norm_topk_prob", "mlp_bias"):
        if config.flag(key, False):
            raise config.unsupported(f"{key}=true")
    only(config, {"scoring_func": "softmax"})
    grouped = {}
    if method != "greedy":
        grouped = {"groups": config.positive("n_group"), "top_groups": config.positive("topk_group")}
    return _deepseek(config, {"normalized": False, **grouped}, default_max=2048, scale=1.0)


def _deepseek_v3(config: ModelValues) -> Architecture:
    only(config, {"scoring_func": "sigmoid", "topk_method": "noaux_tc"})
    rule = {
        "scores": "sigmoid",
        "correction_bias": True,
        "groups": config.positive("n_group", 8),
        "top_groups": config.positive("topk_group", 4),
        "group_score": "two_highest",
        "normalized": config.flag("norm_topk_prob", True),
    }
    turns = config.flag("rope_interleave", True)
    return _deepseek(config, rule, default_max=4096, scale=2.5, default_heads=128, neighbours_turn=turns)


def _deepseek(
    config: ModelValues,
    rule: dict[str, Any],
    *,
    default_max: int,
    scale: float,
    default_heads: int | None = None,
    neighbours_turn: bool = True,
) -> Architecture:
    for key in _UNUSED:
        config.get(key)
    only(config, {"moe_layer_freq": 1})
    bias = config.flag("attention_bias", False)
    turning = config.positive("qk_rope_head_dim", 64)
    if turning % 2:
        raise config.wrong("qk_rope_head_dim", "even, because RoPE rotates pairs")
    arch = rotary_decoder(config, default_heads=default_heads, default_head_dim=turning, default_max=default_max)
    if arch.num_kv_heads != arch.num_heads:
        raise config.wrong("num_key_value_heads", f"num_attention_heads={arch.num_heads}, or null")
    width = config.positive("moe_intermediate_size")
    shared = config.positive_or_null("n_shared_experts", 0 if "n_shared_experts" in config.values else 1) or 0
    latent = LatentConfig(
        rank=config.positive("kv_lora_rank", 512),
        query_rank=config.positive_or_null("q_lora_rank", 1536),
        head_dim=config.positive("qk_nope_head_dim", 128),
        rotary_dim=turning,
        value_dim=config.positive("v_head_dim", 128),
        down_bias=bias,
        neighbours_turn=neighbours_turn,
    )
    arch = replace(
        arch,
        num_kv_heads=1,
        head_dim=latent.cached,
        latent=latent,
        attention_scale=latent.query_dim**-0.5 * _grown(config) ** 2,
        attention_out_bias=bias,
        experts=experts(
            config,
            default=64,
            default_picked=8,
            ffn_size=width,
            shared_ffn_size=shared * width,
            router_float32=True,
            scale=config.number("routed_scaling_factor", scale),
            **rule,
        ),
    )
    dense = config.integer("first_k_dense_replace", 0 if rule["normalized"] is False else 3)
    return layers_of_experts(arch, lambda i: i >= dense)


def _grown(config: ModelValues) -> float:
    """Return YaRN's mscale, which applies to queries and again to keys."""
    old, new = config.part("rope_scaling"), config.part("rope_parameters")
    rope = old if old.values else new
    kind, share = rope.get("rope_type", rope.get("type", "default")), rope.get("mscale_all_dim", 0)
    if kind == "default" or not share or rope.number("factor") <= 1:
        return 1.0
    return 0.1 * rope.number("mscale_all_dim") * math.log(rope.number("factor")) + 1.0


DEEPSEEK = Family(
    name="deepseek",
    readers={
        "deepseek_v2": ("DeepseekV2ForCausalLM", _deepseek_v2),
        "deepseek_v3": ("DeepseekV3ForCausalLM", _deepseek_v3),
        "kimi_k2": ("DeepseekV3ForCausalLM", _deepseek_v3),
    },
    names=replace(LLAMA, further_layers=True),
    keys=EXPERT_KEYS
    | {
        "latent.rank": "kv_lora_rank",
        "latent.query_rank": "q_lora_rank",
        "latent.head_dim": "qk_nope_head_dim",
        "latent.rotary_dim": "qk_rope_head_dim",
        "latent.value_dim": "v_head_dim",
        "latent.down_bias": "attention_bias",
    },
)


# Keys of published configs, with the only supported value.
_FIXED = {"moe_layer_freq": 1, "scoring_func": "noaux_tc", "topk_method": "noaux_tc"}


def _dots1(config: ModelValues) -> Architecture:
    only(config, _FIXED)
    arch = rotary_decoder(config, default_heads=32, default_max=2048)
    width = config.positive("moe_intermediate_size", 1408)
    of = experts_in_groups(
        config,
        default=config.positive("n_routed_experts"),
        default_picked=None,
        normalized=False,
        width=width,
        shared=config.positive("n_shared_experts") * width,
    )
    arch = replace(arch, **attention_biases(config), qk_norm=True, experts=of)
    window, first = config.positive_or_null("sliding_window", 4096), config.integer("max_window_layers", 62)
    arch = windows(config, arch, window, lambda i: window is not None and i >= first)
    dense = config.integer("first_k_dense_replace", 0)
    return layers_of_experts(arch, lambda i: i >= dense)


DOTS1 = Family(
    name="dots1",
    readers={"dots1": ("Dots1ForCausalLM", _dots1)},
    keys=EXPERT_KEYS,
)
