"""LLaMA 1 to 3, models saved under its name (SmolLM2, Yi, Vicuna), Seed-OSS, AFM, InternLM 2 and 2.5, SmolLM3.

InternLM has fused q, k and v, by KV group. Source: modeling_internlm2.py of internlm/internlm2_5-7b. Every fourth layer
of SmolLM3 has no positions.
"""

from __future__ import annotations

from dataclasses import replace

from ...conf.architecture import Architecture
from ...conf.errors import ConfigError
from ..model_config import ModelValues
from ..names import Names
from ..rotary_config import RopeKeys
from .common import attention_biases, by_layer, rotary_decoder, with_layers
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
)
SEED_OSS = Family(
    name="seed-oss",
    readers={"seed_oss": ("SeedOssForCausalLM", _seed_oss)},
    keys=KEYS | {"attention_out_bias": "attention_out_bias"},
)


def _internlm2(config: ModelValues) -> Architecture:
    return replace(
        rotary_decoder(config, default_max=2048),
        **attention_biases(config, "bias", default=True),
    )


INTERNLM2 = Family(
    name="internlm2",
    readers={"internlm2": ("InternLM2ForCausalLM", _internlm2)},
    names=Names(
        embedding="model.tok_embeddings.weight",
        layer="model.layers.{}.",
        attention_norm="attention_norm",
        q="attention.wqkv",
        k="attention.wqkv",
        v="attention.wqkv",
        attention_out="attention.wo",
        ffn_norm="ffn_norm",
        gate="feed_forward.w1",
        up="feed_forward.w3",
        down="feed_forward.w2",
        final_norm="model.norm",
        head="output.weight",
        grouped=True,
    ),
)


def _smollm3(config: ModelValues) -> Architecture:
    arch = rotary_decoder(config, default_heads=4, default_max=32768, rope=RopeKeys(default_theta=2e6), tied=True)
    count, every = arch.num_layers, config.positive("no_rope_layer_interval", 4)
    turns = config.get("no_rope_layers", [int((i + 1) % every != 0) for i in range(count)])
    if not isinstance(turns, list) or len(turns) != count or not all(type(x) is int for x in turns):
        raise config.wrong("no_rope_layers", "a list of 0 (no positions) and 1, one for each of num_hidden_layers")
    config.asked.add("max_window_layers")  # in published configs, but unused
    window = config.positive_or_null("sliding_window")
    slides = config.flag("use_sliding_window", False) and window is not None
    found = by_layer(config, count, window, lambda i: slides and not turns[i])
    arch = replace(arch, **attention_biases(config), ffn_bias=config.flag("mlp_bias", False))
    kinds = zip(found, turns, strict=True)
    return with_layers(arch, (replace(arch.kind(0), window=own, rope=bool(turn)) for own, turn in kinds))


SMOLLM3 = Family(
    name="smollm3",
    readers={"smollm3": ("SmolLM3ForCausalLM", _smollm3)},
)
