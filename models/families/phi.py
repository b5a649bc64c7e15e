"""Phi.

Phi 1, 1.5 and 2: parallel attention and feed-forward, one LayerNorm, all biases, RoPE on half of each head. Phi 3, 3.5
and 4: fused q, k and v, fused gate and up; LongRoPE on part of each head.
"""

from __future__ import annotations

from dataclasses import replace

from ...conf.architecture import Architecture
from ..model_config import ModelValues
from ..names import LLAMA
from ..rotary_config import RopeKeys
from .common import all_biases, rotary_decoder
from .family import Family


def _phi(config: ModelValues) -> Architecture:
    if config.flag("qk_layernorm", False):
        raise config.unsupported("qk_layernorm=true (LayerNorm of queries and keys)")
    return replace(
        rotary_decoder(
            config,
            default_max=2048,
            rope=RopeKeys(default_turned=0.5),
            eps=("layer_norm_eps", 1e-5),
            act=("hidden_act", "gelu_new"),
        ),
        norm="layer",
        norms="shared",
        gated_ffn=False,
        **all_biases(True),
        head_bias=True,
    )


PHI = Family(
    name="phi",
    readers={"phi": ("PhiForCausalLM", _phi)},
    names=replace(
        LLAMA,
        attention_out="self_attn.dense",
        gate="",
        up="mlp.fc1",
        down="mlp.fc2",
        final_norm="model.final_layernorm",
    ),
)


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
)
