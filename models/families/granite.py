"""Granite 3, dense and MoE: a LLaMA with multipliers for embeddings, attention scores, residuals and logits."""

from __future__ import annotations

from dataclasses import replace

from ...conf.architecture import Architecture
from ..model_config import ModelValues
from ..names import LLAMA
from .common import attention_biases, experts, rotary_decoder
from .family import KEYS, Family


def _granite(config: ModelValues) -> Architecture:
    return replace(_scaled(config), ffn_bias=config.flag("mlp_bias", False))


def _granite_moe(config: ModelValues) -> Architecture:
    arch = _scaled(config)
    of = experts(config, ("num_local_experts", "num_experts_per_tok"), default=8, default_picked=2)
    return replace(arch, experts=of)


def _scaled(config: ModelValues) -> Architecture:
    return replace(
        rotary_decoder(config, default_max=2048),
        **attention_biases(config),
        embedding_scale=config.number("embedding_multiplier", 1.0),
        residual_scale=config.number("residual_multiplier", 1.0),
        attention_scale=config.number("attention_multiplier", 1.0),
        logit_scale=1 / config.number("logits_scaling", 1.0),
    )


GRANITE = Family(
    name="granite",
    readers={"granite": ("GraniteForCausalLM", _granite)},
    about="Granite 3.0 to 3.3, dense",
    refused="hybrids with Mamba",
)
_GATE_UP = "block_sparse_moe.input_linear.weight[{}]"
GRANITE_MOE = Family(
    name="granite-moe",
    readers={"granitemoe": ("GraniteMoeForCausalLM", _granite_moe)},
    names=replace(
        LLAMA,
        router="block_sparse_moe.router.layer",
        expert="",
        expert_gate=_GATE_UP,
        expert_up=_GATE_UP,
        expert_down="block_sparse_moe.output_linear.weight[{}]",
    ),
    keys=KEYS | {"experts.num_experts": "num_local_experts"},
    about="Granite 3.0 and 3.1 1B-A400M and 3B-A800M, PowerMoE",
    refused="a shared expert, hybrids with Mamba",
)
