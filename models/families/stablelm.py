"""Models with LayerNorm, and RoPE on part of each head.

StableLM 1 and 2: a quarter, optional parallel attention and feed-forward. Nemotron 3 and 4, Minitron: half, LayerNorm
with 1 + weight, squared ReLU without gate.
"""

from __future__ import annotations

from dataclasses import replace

from ...conf.architecture import Architecture
from ...conf.errors import ConfigError
from ..model_config import ModelValues
from ..names import LLAMA
from ..rotary_config import RopeKeys
from .common import attention_biases, rotary_decoder
from .family import KEYS, Family


def _stablelm(config: ModelValues) -> Architecture:
    if config.flag("qk_layernorm", False):
        raise config.unsupported("qk_layernorm=true (a norm of its own for each head)")
    config.positive("num_key_value_heads", 32)  # null is not allowed
    arch = rotary_decoder(
        config, default_heads=32, default_max=4096, rope=RopeKeys(default_turned=0.25), eps=("layer_norm_eps", 1e-5)
    )
    if arch.head_dim * arch.num_heads != arch.hidden_size:
        heads, hidden = arch.num_heads, arch.hidden_size
        raise ConfigError(f"{config.path}: num_attention_heads={heads}: must divide hidden_size={hidden}, by head_dim")
    return replace(
        arch,
        norm="layer",
        norms="shared" if config.flag("use_parallel_residual", False) else "before",
        qkv_bias=config.flag("use_qkv_bias", False),
    )


STABLELM = Family(
    name="stablelm",
    readers={"stablelm": ("StableLmForCausalLM", _stablelm)},
    keys=KEYS | {"norms": "use_parallel_residual", "qkv_bias": "use_qkv_bias"},
)


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
)
