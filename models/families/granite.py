"""LLaMAs with multipliers for embeddings, attention scores, residuals and logits: Granite 3, MiniCPM 1 and 2.

Source of MiniCPM: modeling_minicpm.py of openbmb/MiniCPM-2B-sft-bf16.
"""

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
)


def _minicpm(config: ModelValues) -> Architecture:
    arch = rotary_decoder(config, default_max=2048, tied=True)
    return replace(
        arch,
        **attention_biases(config),
        embedding_scale=config.number("scale_emb", 1.0),
        residual_scale=config.number("scale_depth", 1.0) / arch.num_layers**0.5,
        logit_scale=config.number("dim_model_base", 1.0) / arch.hidden_size,
    )


MINICPM = Family(
    name="minicpm",
    readers={"minicpm": ("MiniCPMForCausalLM", _minicpm)},
)
