"""OLMo 2: norms after attention and feed-forward, and norms of queries and keys over all heads together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..model_config import ModelValues
from ..names import LLAMA
from .common import rotary
from .family import Family


def _olmo2(config: ModelValues) -> dict[str, Any]:
    bias = config.flag("attention_bias", False)
    return {
        **rotary(config, default_heads=None, default_head_dim=None, default_max=2048, eps=("rms_norm_eps", 1e-5)),
        "norms": "after",
        "qk_norm": True,
        "qk_norm_over": "width",
        "qkv_bias": bias,
        "attention_out_bias": bias,
    }


OLMO2 = Family(
    name="olmo2",
    readers={"Olmo2ForCausalLM": _olmo2},
    model_types={"olmo2": "Olmo2ForCausalLM"},
    names=replace(
        LLAMA,
        attention_norm="",
        attention_norm_after="post_attention_layernorm",
        ffn_norm="",
        ffn_norm_after="post_feedforward_layernorm",
    ),
    about="OLMo 2",
)
