"""Phi 3, 3.5 and 4: one tensor holds q, k and v, another gate and up; part of a head turns, by LongRoPE."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..model_config import ModelValues
from ..names import LLAMA
from ..rotary_config import RopeKeys
from .common import rotary
from .family import Family

_KINDS = {"default": "default", "longrope": "longrope", "su": "longrope", "yarn": "longrope"}
_ROPE = RopeKeys(default_turned=1.0, original=4096, kinds=_KINDS)


def _phi3(config: ModelValues) -> dict[str, Any]:
    for key in ("full_attn_mod", "interpolate_factor"):  # of Phi-4-mini, which transformers ignores
        if config.get(key, 1) != 1:
            raise config.unsupported(f"{key}={config.get(key)!r}")
    config.positive("original_max_position_embeddings", 4096)
    return {
        **rotary(config, default_max=4096, rope=_ROPE, eps=("rms_norm_eps", 1e-5)),
        "sliding_window": config.positive_or_null("sliding_window"),
    }


PHI3 = Family(
    name="phi3",
    readers={"phi3": ("Phi3ForCausalLM", _phi3)},
    names=replace(
        LLAMA,
        q="self_attn.qkv_proj",
        k="self_attn.qkv_proj",
        v="self_attn.qkv_proj",
        gate="mlp.gate_up_proj",
        up="mlp.gate_up_proj",
    ),
    about="Phi 3, 3.5 and 4 mini and medium",
    refused="Phi-3-small, Phi-3.5-MoE, images and sound",
)
