"""Mistral, optionally with sliding windows, and its MoE variant Mixtral."""

from __future__ import annotations

from dataclasses import replace

from ...conf.architecture import Architecture
from ..model_config import ModelValues
from ..names import LLAMA
from ..rotary_config import RopeKeys
from .common import experts, rotary_decoder, windows
from .family import KEYS, Family


def _mistral(config: ModelValues) -> Architecture:
    arch = rotary_decoder(config, default_heads=8, default_max=131072)
    window = config.positive_or_null("sliding_window", 4096)
    return windows(config, arch, window, lambda i: window is not None)


def _mixtral(config: ModelValues) -> Architecture:
    return replace(
        rotary_decoder(
            config, default_heads=8, default_max=131072, rope=RopeKeys(default_theta=1e6), eps=("rms_norm_eps", 1e-5)
        ),
        sliding_window=config.positive_or_null("sliding_window"),
        experts=experts(config, default=8, default_picked=2),
    )


MISTRAL = Family(
    name="mistral",
    readers={"mistral": ("MistralForCausalLM", _mistral), "ministral": ("MinistralForCausalLM", _mistral)},
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
)
