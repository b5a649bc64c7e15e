"""Nemotron 3 and 4, Minitron: LayerNorm by 1 + weight, squared relu without gate, and half of each head turns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..model_config import ModelValues
from ..names import LLAMA
from ..rotary_config import RopeKeys
from .common import attention_biases, rotary
from .family import Family


def _nemotron(config: ModelValues) -> dict[str, Any]:
    config.positive("num_key_value_heads")  # null is not allowed
    return {
        **rotary(
            config,
            default_max=4096,
            rope=RopeKeys(default_turned=0.5),
            eps=("norm_eps", 1e-5),
            act=("hidden_act", "relu2"),
        ),
        "norm": "layer",
        "gated_ffn": False,
        **attention_biases(config),
        "ffn_bias": config.flag("mlp_bias", False),
    }


NEMOTRON = Family(
    name="nemotron",
    readers={"nemotron": ("NemotronForCausalLM", _nemotron)},
    names=replace(LLAMA, norm_offset=1.0),
    about="Nemotron 3 and 4, Minitron 4B and 8B",
    refused="hybrids with Mamba",
)
