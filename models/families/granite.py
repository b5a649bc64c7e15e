"""Granite 3: a LLaMA with multipliers of embeddings, scores, what layers add, and logits."""

from __future__ import annotations

from typing import Any

from ..model_config import ModelValues
from .common import rotary
from .family import Family


def _granite(config: ModelValues) -> dict[str, Any]:
    bias = config.flag("attention_bias", False)
    return {
        **rotary(config, default_heads=None, default_head_dim=None, default_max=2048),
        "qkv_bias": bias,
        "attention_out_bias": bias,
        "ffn_bias": config.flag("mlp_bias", False),
        "embedding_scale": config.number("embedding_multiplier", 1.0),
        "residual_scale": config.number("residual_multiplier", 1.0),
        "attention_scale": config.number("attention_multiplier", 1.0),
        "logit_scale": 1 / config.number("logits_scaling", 1.0),
    }


GRANITE = Family(
    name="granite",
    readers={"GraniteForCausalLM": _granite},
    model_types={"granite": "GraniteForCausalLM"},
    about="Granite 3.0 to 3.3, dense",
    refused="Granite MoE and hybrids with Mamba",
)
