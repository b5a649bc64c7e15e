"""Phi 1, 1.5 and 2: parallel attention and feed-forward, one LayerNorm, all biases, RoPE on half of each head."""

from __future__ import annotations

from dataclasses import replace

from ...conf.architecture import Architecture
from ..model_config import ModelValues
from ..names import LLAMA
from ..rotary_config import RopeKeys
from .common import rotary_decoder
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
        qkv_bias=True,
        attention_out_bias=True,
        ffn_bias=True,
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
    about="Phi 1, 1.5 and 2",
)
