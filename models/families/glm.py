"""GLM-4: interleaved RoPE on half of each head; GLM-4-0414 has pre- and post-norms; GLM-4.5 is MoE."""

from __future__ import annotations

from dataclasses import replace

from ...conf.architecture import Architecture
from ..model_config import ModelValues
from ..names import LLAMA
from ..rotary_config import RopeKeys
from .common import experts_in_groups, layers_of_experts, rotary_decoder
from .family import EXPERT_KEYS, Family


def _glm(config: ModelValues) -> Architecture:
    if not config.tokens("eos_token_id"):
        raise config.wrong("eos_token_id", "given")
    for key, default in (("num_key_value_heads", 2), ("head_dim", 128)):
        config.positive(key, default)  # null is not allowed
    return replace(
        rotary_decoder(
            config,
            default_heads=2,
            default_head_dim=128,
            default_max=131072,
            rope=RopeKeys(default_turned=0.5),
            eps=("rms_norm_eps", 1.5625e-07),
        ),
        qkv_bias=config.flag("attention_bias", True),
    )


def _glm4(config: ModelValues) -> Architecture:
    return replace(_glm(config), norms="both")


def _glm4_moe(config: ModelValues) -> Architecture:
    for key in ("num_mtp_layers", "num_nextn_predict_layers"):
        config.get(key)  # MTP layers are not used
    arch = rotary_decoder(
        config, default_heads=8, default_max=131072, rope=RopeKeys(default_turned=0.5), eps=("rms_norm_eps", 1e-5)
    )
    width = config.positive("moe_intermediate_size", 1408)
    of = experts_in_groups(
        config,
        default=128,
        default_picked=8,
        normalized=True,
        width=width,
        shared=config.positive("n_shared_experts", 1) * width,
    )
    arch = replace(
        arch,
        qkv_bias=config.flag("attention_bias", False),
        qk_norm=config.flag("use_qk_norm", False),
        experts=of,
    )
    dense = config.integer("first_k_dense_replace", 1)
    return layers_of_experts(arch, lambda i: i >= dense)


_GLM = replace(LLAMA, gate="mlp.gate_up_proj", up="mlp.gate_up_proj", neighbours_turn=True)
GLM = Family(
    name="glm",
    readers={"glm": ("GlmForCausalLM", _glm)},
    names=_GLM,
)
GLM4 = Family(
    name="glm4",
    readers={"glm4": ("Glm4ForCausalLM", _glm4)},
    names=replace(
        _GLM,
        attention_norm_after="post_self_attn_layernorm",
        ffn_norm="post_attention_layernorm",
        ffn_norm_after="post_mlp_layernorm",
    ),
)
GLM4_MOE = Family(
    name="glm4-moe",
    readers={"glm4_moe": ("Glm4MoeForCausalLM", _glm4_moe)},
    names=replace(LLAMA, further_layers=True),
    keys=EXPERT_KEYS | {"qk_norm": "use_qk_norm"},
)
