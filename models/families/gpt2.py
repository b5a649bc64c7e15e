"""GPT-2: learned positions, LayerNorm, biases everywhere, and weights that are stored as [in, out]."""

from __future__ import annotations

from ...conf.architecture import Architecture
from ...conf.errors import ConfigError
from ..model_config import ModelValues
from ..names import Names
from .common import activation, all_biases
from .family import Family


def _gpt2(config: ModelValues) -> Architecture:
    for key in ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention"):
        if config.flag(key, False):
            raise config.unsupported(f"{key}=true")
    if not config.flag("scale_attn_weights", True):
        raise config.unsupported("scale_attn_weights=false")
    head_key = config.first("num_attention_heads", "n_head")
    hidden, heads = config.positive(config.first("hidden_size", "n_embd"), 768), config.positive(head_key, 12)
    if hidden % heads:
        raise ConfigError(f"{config.path}: {head_key}={heads}: must divide n_embd={hidden}")
    return Architecture(
        vocab_size=config.positive("vocab_size", 50257),
        hidden_size=hidden,
        num_layers=config.positive(config.first("num_hidden_layers", "n_layer"), 12),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        ffn_size=config.positive_or_null("n_inner") or 4 * hidden,
        max_position=config.positive(config.first("max_position_embeddings", "n_positions"), 1024),
        norm="layer",
        norm_eps=config.number("layer_norm_epsilon", 1e-5),
        position="learned",
        activation=activation(config, "activation_function", "gelu_new"),
        gated_ffn=False,
        **all_biases(True),
        tie_embeddings=config.flag("tie_word_embeddings", True),
    )


GPT2 = Family(
    name="gpt2",
    readers={"gpt2": ("GPT2LMHeadModel", _gpt2)},
    names=Names(
        embedding="transformer.wte.weight",
        positions="transformer.wpe.weight",
        layer="transformer.h.{}.",
        attention_norm="ln_1",
        q="attn.c_attn",
        k="attn.c_attn",
        v="attn.c_attn",
        attention_out="attn.c_proj",
        ffn_norm="ln_2",
        up="mlp.c_fc",
        down="mlp.c_proj",
        final_norm="transformer.ln_f",
        transposed=True,
    ),
    keys={
        "hidden_size": "n_embd or hidden_size",
        "num_layers": "n_layer or num_hidden_layers",
        "ffn_size": "n_inner",
        "max_position": "n_positions or max_position_embeddings",
        "vocab_size": "vocab_size",
        "tie_embeddings": "tie_word_embeddings",
    },
)
