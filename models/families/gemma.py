"""Gemma 2 and 3, text: norms before and after, windows in most layers, scaled embeddings, capped scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ...conf.architecture import LayerKind
from ...conf.errors import ConfigError
from ..model_config import ModelValues
from ..names import LLAMA
from ..rotary_config import RopeKeys, read_scaling
from .common import attention_biases, by_layer, layers, layers_with_ropes, ropes_by_kind, rotary, without_ropes
from .family import Family

_SIZES = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
}
_FULL, _SLIDING = RopeKeys(default_theta=1e6), RopeKeys(theta="rope_local_base_freq")


def _gemma(config: ModelValues, *, vocab_size: int, default_max: int, rope: RopeKeys) -> dict[str, Any]:
    """Read what both have, but for caps and kinds of layers."""
    if config.get("use_bidirectional_attention", False):
        raise config.unsupported("use_bidirectional_attention=true")
    config.asked.add("hidden_act")  # transformers goes by hidden_activation alone
    config.positive("num_key_value_heads", 4)  # null is not allowed
    config.positive("head_dim", 256)
    fields = rotary(
        config,
        default_heads=4,
        default_head_dim=256,
        default_max=default_max,
        rope=rope,
        act=("hidden_activation", "gelu_pytorch_tanh"),
        tied=True,
        sizes=_SIZES | {"vocab_size": vocab_size},
    )
    hidden, heads = fields["hidden_size"], fields["num_heads"]
    if hidden % heads:
        raise ConfigError(f"{config.path}: num_attention_heads={heads}: must divide hidden_size={hidden}")
    width = config.positive("query_pre_attn_scalar", 256)
    return fields | {
        "norms": "both",
        **attention_biases(config),
        "attention_scale": None if width == fields["head_dim"] else width**-0.5,
        "embedding_scale": hidden**0.5,
    }


def _windows(config: ModelValues, fields: dict[str, Any], slides: Callable[[int], bool]) -> list[int | None]:
    window = config.positive_or_null("sliding_window", 4096)
    return by_layer(
        config, fields["num_layers"], lambda i: "sliding_attention" if slides(i) else "full_attention", window
    )


def _gemma2(config: ModelValues) -> dict[str, Any]:
    fields = _gemma(config, vocab_size=256000, default_max=8192, rope=RopeKeys())
    fields["attention_softcap"] = config.number_or_null("attn_logit_softcapping", 50.0)
    fields["logit_softcap"] = config.number_or_null("final_logit_softcapping", 30.0)
    turning = {"rope_theta": fields["rope_theta"], "rope_scaling": fields["rope_scaling"]}
    found = _windows(config, fields, lambda i: i % 2 == 0)
    return fields | layers(LayerKind(window=window, **turning) for window in found)


def _gemma3(config: ModelValues) -> dict[str, Any]:
    own = without_ropes(config)
    fields = _gemma(own, vocab_size=262208, default_max=131072, rope=_FULL)
    fields["logit_softcap"] = own.number_or_null("final_logit_softcapping")
    pattern = own.positive("sliding_window_pattern", 6)
    config.asked.add("_sliding_window_pattern")  # transformers writes and ignores it
    found = _windows(own, fields, lambda i: (i + 1) % pattern != 0)
    full, sliding = (
        read_scaling(config, rope, keys, max_position=fields["max_position"])
        for rope, keys in zip(ropes_by_kind(config), (_FULL, _SLIDING), strict=True)
    )
    return fields | {"qk_norm": True} | layers_with_ropes(found, full, sliding)


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
    about="Gemma 2",
    refused="attention in both directions",
)
GEMMA3 = Family(
    name="gemma3",
    readers={"gemma3_text": ("Gemma3ForCausalLM", _gemma3)},
    text_of={"Gemma3ForConditionalGeneration": "gemma3_text"},
    names=_GEMMA,
    about="Gemma 3, also the text model of those that read images",
    refused="images, attention in both directions",
)
