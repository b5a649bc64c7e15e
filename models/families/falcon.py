"""Falcon, GPT-NeoX and Pythia: parallel attention and feed-forward; fused q, k and v, by KV group.

Falcon 7B has multi-query attention. GPT-NeoX and Pythia have a LayerNorm each for attention and feed-forward.
"""

from __future__ import annotations

from dataclasses import replace

from ...conf.architecture import Architecture
from ...conf.errors import ConfigError
from ..model_config import ModelValues
from ..names import Names
from ..rotary_config import RopeKeys, read_rope
from .common import activation, all_biases, attention_biases, rotary_decoder, vocabulary
from .family import KEYS, Family


def _falcon(config: ModelValues) -> Architecture:
    if config.flag("alibi", False):
        raise config.unsupported("alibi=true")
    hidden, heads = config.positive("hidden_size", 4544), config.positive("num_attention_heads", 71)
    if hidden % heads or hidden // heads % 2:
        raise ConfigError(f"{config.path}: num_attention_heads={heads}: must divide hidden_size={hidden} evenly")
    is_new, is_parallel = config.flag("new_decoder_architecture", False), config.flag("parallel_attn", True)
    if is_new and not is_parallel:
        raise config.unsupported("new_decoder_architecture=true with parallel_attn=false")
    kv_heads = config.positive_or_null("num_kv_heads") or heads
    has_one = config.flag("multi_query", True)
    if not is_new:
        kv_heads = 1 if has_one else heads
    if heads % kv_heads:
        raise ConfigError(f"{config.path}: num_kv_heads={kv_heads}: must divide num_attention_heads={heads}")
    norms = config.positive_or_null("num_ln_in_parallel_attn") or (2 if is_new else 1)
    if norms > 2 or (norms == 2 and not is_new):
        raise config.unsupported(f"num_ln_in_parallel_attn={norms}, new_decoder_architecture={is_new}")
    vocab = vocabulary(config, 65024)
    max_position = config.positive("max_position_embeddings", 2048)
    rope, bias = read_rope(config, RopeKeys(), max_position=max_position), config.flag("bias", False)
    return Architecture(
        family="falcon2" if norms == 2 else "falcon",
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=config.positive("num_hidden_layers", 32),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
        ffn_size=config.positive_or_null("ffn_hidden_size") or 4 * hidden,
        max_position=max_position,
        norm="layer",
        norms="before" if not is_parallel else "parallel" if norms == 2 else "shared",
        norm_eps=config.number("layer_norm_epsilon", 1e-5),
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        activation=activation(config, "activation", "gelu"),
        gated_ffn=False,
        **all_biases(bias),
        tie_embeddings=config.flag("tie_word_embeddings", True),
    )


_FALCON = Names(
    embedding="transformer.word_embeddings.weight",
    layer="transformer.h.{}.",
    attention_norm="input_layernorm",
    q="self_attention.query_key_value",
    k="self_attention.query_key_value",
    v="self_attention.query_key_value",
    attention_out="self_attention.dense",
    ffn_norm="post_attention_layernorm",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
    final_norm="transformer.ln_f",
    grouped=True,
)
_KEYS = KEYS | {
    "norms": "new_decoder_architecture, num_ln_in_parallel_attn or parallel_attn",
    "num_kv_heads": "num_kv_heads, multi_query or new_decoder_architecture",
    "ffn_size": "ffn_hidden_size",
    **all_biases("bias"),
}
FALCON = Family(
    name="falcon",
    readers={"falcon": ("FalconForCausalLM", _falcon)},
    variants=("falcon2",),
    names=_FALCON,
    keys=_KEYS,
)
FALCON2 = Family(
    name="falcon2",
    names=replace(_FALCON, attention_norm="ln_attn", ffn_norm="ln_mlp"),
    keys=_KEYS,
)


_ROPE = RopeKeys(theta="rotary_emb_base", turned="rotary_pct", default_turned=0.25)


def _gpt_neox(config: ModelValues) -> Architecture:
    if config.flag("is_decoder", False) and config.get("add_cross_attention"):
        raise config.unsupported("add_cross_attention")
    foreign = {"num_key_value_heads", "head_dim"}  # refused as unknown
    own = ModelValues(config.path, {key: value for key, value in config.values.items() if key not in foreign})
    arch = rotary_decoder(own, default_max=2048, rope=_ROPE, eps=("layer_norm_eps", 1e-5), act=("hidden_act", "gelu"))
    config.asked |= own.asked - foreign
    heads, hidden = arch.num_heads, arch.hidden_size
    if hidden % heads:
        raise ConfigError(f"{config.path}: num_attention_heads={heads}: must divide hidden_size={hidden}")
    return replace(
        arch,
        norm="layer",
        norms="parallel" if config.flag("use_parallel_residual", True) else "before",
        gated_ffn=False,
        **attention_biases(config, default=True),
        ffn_bias=True,
    )


GPT_NEOX = Family(
    name="gpt_neox",
    readers={"gpt_neox": ("GPTNeoXForCausalLM", _gpt_neox)},
    names=Names(
        embedding="gpt_neox.embed_in.weight",
        layer="gpt_neox.layers.{}.",
        attention_norm="input_layernorm",
        q="attention.query_key_value",
        k="attention.query_key_value",
        v="attention.query_key_value",
        attention_out="attention.dense",
        ffn_norm="post_attention_layernorm",
        up="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h",
        final_norm="gpt_neox.final_layer_norm",
        head="embed_out.weight",
        grouped=True,
    ),
)
