"""gpt-oss: windows in every second layer, attention sinks, biased experts stored as two tensors per layer."""

from __future__ import annotations

from dataclasses import replace

from ...conf.architecture import Architecture
from ..model_config import ModelValues
from ..names import LLAMA
from ..rotary_config import RopeKeys
from .common import attention_biases, experts, rotary_decoder, windows
from .family import KEYS, Family


def _gpt_oss(config: ModelValues) -> Architecture:
    for key in ("experts_per_token", "initial_context_length"):
        config.get(key)  # aliases of keys that are read
    if config.get("rope_scaling") is None and config.get("rope_parameters") is None:
        raise config.wrong("rope_scaling", "given")
    rope = RopeKeys(default_theta=150000.0)
    arch = rotary_decoder(config, default_heads=8, default_head_dim=64, default_max=131072, rope=rope)
    rule = {
        "router_bias": True,
        "clamp": config.number("swiglu_limit", 7.0),
        "sigmoid_factor": config.number("swiglu_alpha", 1.702),
        "bias": True,
    }
    arch = replace(
        arch,
        norm_eps=config.number("rms_norm_eps", 1e-5),
        **attention_biases(config, default=True),
        attention_sinks=True,
        experts=experts(config, default=128, default_picked=4, **rule),
    )
    window = config.positive_or_null("sliding_window", 128)
    return windows(config, arch, window, lambda i: i % 2 == 0)


GPT_OSS = Family(
    name="gpt-oss",
    readers={"gpt_oss": ("GptOssForCausalLM", _gpt_oss)},
    names=replace(LLAMA, sinks="self_attn.sinks", router="mlp.router", fused_experts="mlp.experts."),
    keys=KEYS | {"experts.num_experts": "num_local_experts or num_experts"},
)
