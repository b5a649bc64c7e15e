"""Nemotron 3 and 4, Minitron: LayerNorm with 1 + weight, squared ReLU without gate, RoPE on half of each head."""

from __future__ import annotations

from dataclasses import replace

from ...conf.architecture import Architecture
from ..model_config import ModelValues
from ..names import LLAMA
from ..rotary_config import RopeKeys
from .common import attention_biases, rotary_decoder
from .family import Family


def _nemotron(config: ModelValues) -> Architecture:
    config.positive("num_key_value_heads")  # null is not allowed
    return replace(
        rotary_decoder(
            config,
            default_max=4096,
            rope=RopeKeys(default_turned=0.5),
            eps=("norm_eps", 1e-5),
            act=("hidden_act", "relu2"),
        ),
        norm="layer",
        gated_ffn=False,
        **attention_biases(config),
        ffn_bias=config.flag("mlp_bias", False),
    )


NEMOTRON = Family(
    name="nemotron",
    readers={"nemotron": ("NemotronForCausalLM", _nemotron)},
    names=replace(LLAMA, norm_offset=1.0),
    about="Nemotron 3 and 4, Minitron 4B and 8B",
    refused="hybrids with Mamba",
)
