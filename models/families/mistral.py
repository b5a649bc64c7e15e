"""Mistral, whose layers may have windows, and Mixtral, whose feed-forward blocks are experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..model_config import ModelValues
from ..names import LLAMA
from ..rotary_config import RopeKeys
from .common import experts, rotary, windows
from .family import KEYS, Family


def _mistral(config: ModelValues) -> dict[str, Any]:
    fields = rotary(config, default_heads=8, default_max=131072)
    window = config.positive_or_null("sliding_window", 4096)
    return fields | windows(config, fields, window, lambda i: window is not None)


def _mixtral(config: ModelValues) -> dict[str, Any]:
    return {
        **rotary(
            config, default_heads=8, default_max=131072, rope=RopeKeys(default_theta=1e6), eps=("rms_norm_eps", 1e-5)
        ),
        "sliding_window": config.positive_or_null("sliding_window"),
        "experts": experts(config, default=8, default_picked=2),
    }


MISTRAL = Family(
    name="mistral",
    readers={"mistral": ("MistralForCausalLM", _mistral), "ministral": ("MinistralForCausalLM", _mistral)},
    about="Mistral 7B and Nemo, Ministral 8B",
)
MIXTRAL = Family(
    name="mixtral",
    readers={"mixtral": ("MixtralForCausalLM", _mixtral)},
    names=replace(
        LLAMA,
        router="block_sparse_moe.gate",
        expert="block_sparse_moe.experts.{}.",
        expert_gate="w1",
        expert_up="w3",
        expert_down="w2",
    ),
    keys=KEYS | {"experts.num_experts": "num_local_experts or num_experts"},
    about="Mixtral 8x7B and 8x22B",
)
