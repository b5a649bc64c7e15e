"""Phi 3, 3.5 and 4: fused q, k and v, fused gate and up; LongRoPE on part of each head."""

from __future__ import annotations

from dataclasses import replace

from ...conf.architecture import Architecture
from ..model_config import ModelValues
from ..names import LLAMA
from ..rotary_config import RopeKeys
from .common import rotary_decoder
from .family import Family

_KINDS = {"default": "default", "longrope": "longrope", "su": "longrope", "yarn": "longrope"}
_ROPE = RopeKeys(default_turned=1.0, original=4096, kinds=_KINDS)


def _phi3(config: ModelValues) -> Architecture:
    for key in ("full_attn_mod", "interpolate_factor"):  # in Phi-4-mini; transformers ignores them
        if config.get(key, 1) != 1:
            raise config.unsupported(f"{key}={config.get(key)!r}")
    config.positive("original_max_position_embeddings", 4096)
    return replace(
        rotary_decoder(config, default_max=4096, rope=_ROPE, eps=("rms_norm_eps", 1e-5)),
        sliding_window=config.positive_or_null("sliding_window"),
    )


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
    refused="Phi-3-small, Phi-3.5-MoE, images and audio",
)
