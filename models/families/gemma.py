"""Gemma 2 and 3, text only: pre- and post-norms, windows in most layers, scaled embeddings, soft-capping."""

from __future__ import annotations

from dataclasses import replace

from ...conf.architecture import Architecture
from ...conf.errors import ConfigError
from ..model_config import ModelValues
from ..names import LLAMA
from ..rotary_config import RopeKeys, read_scaling
from .common import (
    attention_biases,
    by_layer,
    layers_with_ropes,
    ropes_by_kind,
    rotary_decoder,
    windows,
    without_ropes,
)
from .family import Family

_SIZES = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
}
_FULL, _SLIDING = RopeKeys(default_theta=1e6), RopeKeys(theta="rope_local_base_freq")


def _gemma(config: ModelValues, *, vocab_size: int, default_max: int, rope: RopeKeys) -> Architecture:
    """Read the arch common to both, without soft-caps and layer kinds."""
    if config.get("use_bidirectional_attention", False):
        raise config.unsupported("use_bidirectional_attention=true")
    config.asked.add("hidden_act")  # transformers reads hidden_activation only
    config.positive("num_key_value_heads", 4)  # null is not allowed
    config.positive("head_dim", 256)
    arch = rotary_decoder(
        config,
        default_heads=4,
        default_head_dim=256,
        default_max=default_max,
        rope=rope,
        act=("hidden_activation", "gelu_pytorch_tanh"),
        tied=True,
        sizes=_SIZES | {"vocab_size": vocab_size},
    )
    hidden, heads = arch.hidden_size, arch.num_heads
    if hidden % heads:
        raise ConfigError(f"{config.path}: num_attention_heads={heads}: must divide hidden_size={hidden}")
    width = config.positive("query_pre_attn_scalar", 256)
    return replace(
        arch,
        norms="both",
        **attention_biases(config),
        attention_scale=None if width == arch.head_dim else width**-0.5,
        embedding_scale=hidden**0.5,
    )


def _gemma2(config: ModelValues) -> Architecture:
    arch = _gemma(config, vocab_size=256000, default_max=8192, rope=RopeKeys())
    arch = replace(
        arch,
        attention_softcap=config.number_or_null("attn_logit_softcapping", 50.0),
        logit_softcap=config.number_or_null("final_logit_softcapping", 30.0),
    )
    return windows(config, arch, config.positive_or_null("sliding_window", 4096), lambda i: i % 2 == 0)


def _gemma3(config: ModelValues) -> Architecture:
    own = without_ropes(config)
    arch = _gemma(own, vocab_size=262208, default_max=131072, rope=_FULL)
    arch = replace(arch, qk_norm=True, logit_softcap=own.number_or_null("final_logit_softcapping"))
    pattern = own.positive("sliding_window_pattern", 6)
    config.asked.add("_sliding_window_pattern")  # transformers writes and ignores it
    window = config.positive_or_null("sliding_window", 4096)
    found = by_layer(own, arch.num_layers, window, lambda i: (i + 1) % pattern != 0)
    full, sliding = (
        read_scaling(config, rope, keys, max_position=arch.max_position)
        for rope, keys in zip(ropes_by_kind(config), (_FULL, _SLIDING), strict=True)
    )
    return layers_with_ropes(arch, found, full, sliding)


_GEMMA = replace(
    LLAMA,
    attention_norm_after="post_attention_layernorm",
    ffn_norm="pre_feedforward_layernorm",
    ffn_norm_after="post_feedforward_layernorm",
    norm_offset=1.0,
)
GEMMA2 = Family(
    name="gemma2",
    readers={"gemma2": ("Gemma2ForCausalLM", _gemma2)},
    names=_GEMMA,
)
GEMMA3 = Family(
    name="gemma3",
    readers={"gemma3_text": ("Gemma3ForCausalLM", _gemma3)},
    text_of={"Gemma3ForConditionalGeneration": "gemma3_text"},
    names=_GEMMA,
)
