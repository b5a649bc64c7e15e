"""InternLM 2 and 2.5: a LLaMA with fused q, k and v, by KV group.

Source: modeling_internlm2.py of internlm/internlm2_5-7b.
"""

from __future__ import annotations

from dataclasses import replace

from ...conf.architecture import Architecture
from ..model_config import ModelValues
from ..names import Names
from .common import attention_biases, rotary_decoder
from .family import Family


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
    about="InternLM 2 and 2.5",
    refused="InternLM 2 with reward heads",
)
