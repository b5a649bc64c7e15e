"""GLM-4: neighbouring elements of half a head turn together; GLM-4-0414 has norms before and after."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..model_config import ModelValues
from ..names import LLAMA
from ..rotary_config import RopeKeys
from .common import rotary
from .family import Family


def _glm(config: ModelValues) -> dict[str, Any]:
    if not config.tokens("eos_token_id"):
        raise config.wrong("eos_token_id", "given")
    for key, default in (("num_key_value_heads", 2), ("head_dim", 128)):
        config.positive(key, default)  # null is not allowed
    return {
        **rotary(
            config,
            default_heads=2,
            default_head_dim=128,
            default_max=131072,
            rope=RopeKeys(default_turned=0.5),
            eps=("rms_norm_eps", 1.5625e-07),
        ),
        "qkv_bias": config.flag("attention_bias", True),
    }


def _glm4(config: ModelValues) -> dict[str, Any]:
    return _glm(config) | {"norms": "both"}


_GLM = replace(LLAMA, gate="mlp.gate_up_proj", up="mlp.gate_up_proj", neighbours_turn=True)
GLM = Family(
    name="glm",
    readers={"GlmForCausalLM": _glm},
    model_types={"glm": "GlmForCausalLM"},
    names=_GLM,
    about="GLM-4-9B in the layout of transformers",
)
GLM4 = Family(
    name="glm4",
    readers={"Glm4ForCausalLM": _glm4},
    model_types={"glm4": "Glm4ForCausalLM"},
    names=replace(
        _GLM,
        attention_norm_after="post_self_attn_layernorm",
        ffn_norm="post_attention_layernorm",
        ffn_norm_after="post_mlp_layernorm",
    ),
    about="GLM-4-0414, GLM-Z1",
    refused="images",
)
