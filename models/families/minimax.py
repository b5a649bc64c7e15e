"""MiniMax-M2: QK norms over all heads together, partial RoPE, experts in every layer."""

from __future__ import annotations

from dataclasses import replace

from ...conf.architecture import Architecture
from ..model_config import ModelValues
from ..names import LLAMA
from ..rotary_config import RopeKeys
from .common import experts, only, rotary_decoder
from .family import KEYS, Family

# Unused keys of published configs: MTP, training, and MiniMax-01 layer kinds that M2 lacks.
_UNUSED = ("use_mtp", "num_mtp_modules", "mtp_transformer_layers", "mlp_intermediate_size", "shared_moe_mode")
_FIXED = {
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "shared_intermediate_size": 0,
}
_BETAS = ("layernorm_full_attention_beta", "layernorm_linear_attention_beta", "layernorm_mlp_beta")


def _minimax_m2(config: ModelValues) -> Architecture:
    for key in (*_UNUSED, *_BETAS):
        config.get(key)
    only(config, _FIXED)
    kinds = config.get("attn_type_list", [1])
    if not isinstance(kinds, list) or any(kind != 1 for kind in kinds):
        raise config.unsupported(f"attn_type_list={kinds!r}: attention that is not softmax")
    rope = RopeKeys(default_theta=5e6, default_turned=1.0)
    arch = rotary_decoder(config, default_heads=8, default_head_dim=128, default_max=196608, rope=rope)
    turned = config.positive_or_null("rotary_dim")
    if "partial_rotary_factor" in config.values:  # takes precedence
        turned = None
    rule = {"scores": "sigmoid", "correction_bias": True}
    return replace(
        arch,
        rotary_dim=turned if turned is not None and turned != arch.head_dim else arch.rotary_dim,
        qk_norm=True,
        qk_norm_over="width",
        experts=experts(config, default=256, default_picked=8, **rule),
    )


MINIMAX_M2 = Family(
    name="minimax-m2",
    readers={"minimax_m2": ("MiniMaxM2ForCausalLM", _minimax_m2)},
    names=replace(
        LLAMA,
        q_norm="self_attn.q_norm.weight",
        k_norm="self_attn.k_norm.weight",
        router="block_sparse_moe.gate",
        correction="block_sparse_moe.e_score_correction_bias",
        expert="block_sparse_moe.experts.{}.",
        expert_gate="w1",
        expert_up="w3",
        expert_down="w2",
        further_layers=True,
    ),
    keys=KEYS | {"experts.num_experts": "num_local_experts or num_experts"},
)
