"""dots.llm1: Qwen 3 attention, and DeepSeek V3 experts after dense first layers."""

from __future__ import annotations

from dataclasses import replace

from ...conf.architecture import Architecture
from ..model_config import ModelValues
from .common import attention_biases, experts_in_groups, layers_of_experts, rotary_decoder, windows
from .family import EXPERT_KEYS, Family

# Keys of published configs, with the only supported value.
_FIXED = {"moe_layer_freq": 1, "scoring_func": "noaux_tc", "topk_method": "noaux_tc"}


def _dots1(config: ModelValues) -> Architecture:
    for key, value in _FIXED.items():
        if config.get(key, value) != value:
            raise config.unsupported(f"{key}={config.get(key)}")
    arch = rotary_decoder(config, default_heads=32, default_max=2048)
    width = config.positive("moe_intermediate_size", 1408)
    of = experts_in_groups(
        config,
        default=config.positive("n_routed_experts"),
        default_picked=None,
        normalized=False,
        width=width,
        shared=config.positive("n_shared_experts") * width,
    )
    arch = replace(arch, **attention_biases(config), qk_norm=True, experts=of)
    window, first = config.positive_or_null("sliding_window", 4096), config.integer("max_window_layers", 62)
    arch = windows(config, arch, window, lambda i: window is not None and i >= first)
    dense = config.integer("first_k_dense_replace", 0)
    return layers_of_experts(arch, lambda i: i >= dense)


DOTS1 = Family(
    name="dots1",
    readers={"dots1": ("Dots1ForCausalLM", _dots1)},
    keys=EXPERT_KEYS,
    about="dots.llm1",
)
