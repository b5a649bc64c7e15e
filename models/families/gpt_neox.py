"""GPT-NeoX and Pythia: parallel attention and feed-forward, a LayerNorm for each; fused q, k and v, by head."""

from __future__ import annotations

from dataclasses import replace

from ...conf.architecture import Architecture
from ...conf.errors import ConfigError
from ..model_config import ModelValues
from ..names import Names
from ..rotary_config import RopeKeys
from .common import attention_biases, rotary_decoder
from .family import Family

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
    about="GPT-NeoX-20B, Pythia, Dolly",
)
