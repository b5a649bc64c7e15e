"""StableLM 1 and 2: LayerNorm, RoPE on a quarter of each head, optional parallel attention and feed-forward."""

from __future__ import annotations

from dataclasses import replace

from ...conf.architecture import Architecture
from ...conf.errors import ConfigError
from ..model_config import ModelValues
from ..rotary_config import RopeKeys
from .common import rotary_decoder
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
    about="StableLM 3B, 2 1.6B and Zephyr",
    refused="StableLM 2 12B (per-head QK norm)",
)
