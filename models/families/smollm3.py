"""SmolLM3: a LLaMA in which every fourth layer has no positions."""

from __future__ import annotations

from dataclasses import replace

from ...conf.architecture import Architecture
from ..model_config import ModelValues
from ..rotary_config import RopeKeys
from .common import attention_biases, by_layer, rotary_decoder, with_layers
from .family import Family


def _smollm3(config: ModelValues) -> Architecture:
    arch = rotary_decoder(config, default_heads=4, default_max=32768, rope=RopeKeys(default_theta=2e6), tied=True)
    count, every = arch.num_layers, config.positive("no_rope_layer_interval", 4)
    turns = config.get("no_rope_layers", [int((i + 1) % every != 0) for i in range(count)])
    if not isinstance(turns, list) or len(turns) != count or not all(type(x) is int for x in turns):
        raise config.wrong("no_rope_layers", "a list of 0 (no positions) and 1, one for each of num_hidden_layers")
    config.asked.add("max_window_layers")  # in published configs, but unused
    window = config.positive_or_null("sliding_window")
    slides = config.flag("use_sliding_window", False) and window is not None
    found = by_layer(
        config, count, lambda i: "sliding_attention" if slides and not turns[i] else "full_attention", window
    )
    arch = replace(arch, **attention_biases(config), ffn_bias=config.flag("mlp_bias", False))
    kinds = zip(found, turns, strict=True)
    return with_layers(arch, (replace(arch.kind(0), window=own, rope=bool(turn)) for own, turn in kinds))


SMOLLM3 = Family(
    name="smollm3",
    readers={"smollm3": ("SmolLM3ForCausalLM", _smollm3)},
    about="SmolLM3",
)
