"""LLaMA 1 to 3, and models that were saved under its name (SmolLM2, Yi, Vicuna)."""

from __future__ import annotations

from typing import Any

from ..model_config import ModelValues
from .common import rotary
from .family import Family


def _llama(config: ModelValues) -> dict[str, Any]:
    bias = config.flag("attention_bias", False)
    return {
        **rotary(config, default_heads=None, default_head_dim=None, default_max=2048),
        "qkv_bias": bias,
        "attention_out_bias": bias,
        "ffn_bias": config.flag("mlp_bias", False),
    }


LLAMA = Family(
    name="llama",
    readers={"LlamaForCausalLM": _llama},
    model_types={"llama": "LlamaForCausalLM"},
    about="LLaMA 1 to 3, SmolLM2, Yi, Vicuna",
)
