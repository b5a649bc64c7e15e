"""ERNIE 4.5, dense and MoE: interleaved (GPT-J style) RoPE, and one key for all biases."""

from __future__ import annotations

from dataclasses import replace

from ...conf.architecture import Architecture
from ..model_config import ModelValues
from ..names import LLAMA
from ..rotary_config import RopeKeys
from .common import all_biases, experts, layers_of_experts, rotary_decoder
from .family import EXPERT_KEYS, KEYS, Family

# Keys of published configs for training and MTP layers.
_UNUSED = {"moe_capacity", "num_nextn_predict_layers"}
_FIXED = {"moe_gate": "topk", "moe_gate_act": "softmax", "moe_use_aux_free": True, "use_bias": False}
_LEAST_SUM = 1e-9  # the sum of the top-k scores never falls below it


def _turning(config: ModelValues, heads: int, head_dim: int | None) -> Architecture:
    return rotary_decoder(
        config,
        default_heads=heads,
        default_head_dim=head_dim,
        default_max=131072,
        rope=RopeKeys(default_theta=500000.0),
        eps=("rms_norm_eps", 1e-5),
        tied=True,
    )


def _ernie(config: ModelValues) -> Architecture:
    return replace(_turning(config, 2, 128), **all_biases(config.flag("use_bias", False)))


def _ernie_moe(config: ModelValues) -> Architecture:
    config.asked |= _UNUSED
    for key, value in _FIXED.items():
        if config.values.get(key, value) != value or config.get(key, value) is None:
            raise config.unsupported(f"{key}={config.get(key)}")
    if config.number("moe_norm_min", 1e-12) > _LEAST_SUM:
        raise config.unsupported(f"moe_norm_min={config.get('moe_norm_min')}")
    config.positive("num_key_value_heads", 4)  # null is not allowed
    arch, width = _turning(config, 4, None), config.positive("moe_intermediate_size", 1536)
    of = experts(
        config,
        ("moe_num_experts", "moe_k"),
        default=64,
        default_picked=6,
        ffn_size=width,
        shared_ffn_size=max(0, config.integer("moe_num_shared_experts", 2)) * width,
        correction_bias=True,
        router_float32=True,
    )
    first, last = config.integer("moe_layer_start_index", 1), config.integer("moe_layer_end_index", -1)
    last, step = arch.num_layers - 1 if last == -1 else last, config.positive("moe_layer_interval", 1)
    return layers_of_experts(replace(arch, experts=of), lambda i: first <= i <= last and (i + 1) % step == 0)


_NAMES = replace(LLAMA, neighbours_turn=True)
ERNIE = Family(
    name="ernie",
    readers={"ernie4_5": ("Ernie4_5ForCausalLM", _ernie)},
    names=_NAMES,
    keys=KEYS | all_biases("use_bias"),
)
ERNIE_MOE = Family(
    name="ernie-moe",
    readers={"ernie4_5_moe": ("Ernie4_5_MoeForCausalLM", _ernie_moe)},
    names=replace(_NAMES, correction="mlp.moe_statics.e_score_correction_bias[0]", further_layers=True),
    keys=EXPERT_KEYS
    | {
        "experts.num_experts": "moe_num_experts",
        "experts.shared_ffn_size": "moe_num_shared_experts",
        "layers": "moe_layer_start_index, moe_layer_end_index or moe_layer_interval",
    },
)
