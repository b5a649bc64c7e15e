"""LLaMA 1 to 3, models saved under its name (SmolLM2, Yi, Vicuna), Seed-OSS, AFM."""

from __future__ import annotations

from dataclasses import replace

from ...conf.architecture import Architecture
from ...conf.errors import ConfigError
from ..model_config import ModelValues
from .common import attention_biases, rotary_decoder
from .family import KEYS, Family


def _llama(config: ModelValues) -> Architecture:
    return replace(
        rotary_decoder(config, default_max=2048),
        **attention_biases(config),
        ffn_bias=config.flag("mlp_bias", False),
    )


LLAMA = Family(
    name="llama",
    readers={"llama": ("LlamaForCausalLM", _llama)},
    about="LLaMA 1 to 3, SmolLM2, Yi, Vicuna",
)


def _seed_oss(config: ModelValues) -> Architecture:
    return replace(
        rotary_decoder(config, default_heads=8, default_head_dim=128, default_max=524288),
        qkv_bias=config.flag("attention_bias", True),
        attention_out_bias=config.flag("attention_out_bias", False),
        ffn_bias=config.flag("mlp_bias", False),
    )


def _arcee(config: ModelValues) -> Architecture:
    arch = rotary_decoder(config, default_max=4096, eps=("rms_norm_eps", 1e-5), act=("hidden_act", "relu2"))
    heads, hidden = arch.num_heads, arch.hidden_size
    if hidden % heads:
        raise ConfigError(f"{config.path}: num_attention_heads={heads}: must divide hidden_size={hidden}")
    return replace(
        arch,
        gated_ffn=False,
        **attention_biases(config),
        ffn_bias=config.flag("mlp_bias", False),
    )


ARCEE = Family(
    name="arcee",
    readers={"arcee": ("ArceeForCausalLM", _arcee)},
    about="AFM 4.5B",
)
SEED_OSS = Family(
    name="seed-oss",
    readers={"seed_oss": ("SeedOssForCausalLM", _seed_oss)},
    keys=KEYS | {"attention_out_bias": "attention_out_bias"},
    about="Seed-OSS 36B",
)
