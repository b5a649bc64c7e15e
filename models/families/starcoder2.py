"""Starcoder 2: LayerNorm, a feed-forward block without gate, a window, and one key for all biases."""

from __future__ import annotations

from dataclasses import replace

from ...conf.architecture import Architecture
from ..model_config import ModelValues
from ..names import LLAMA
from .common import all_biases, rotary_decoder
from .family import KEYS, Family

# Keys of published configs; transformers reads others (hidden_act, norm_epsilon).
_UNUSED = {"activation_function", "layer_norm_epsilon", "mlp_type", "norm_type", "scale_attn_weights"}
_UNUSED |= {"attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"}


def _starcoder2(config: ModelValues) -> Architecture:
    config.asked |= _UNUSED
    config.positive("num_key_value_heads", 2)  # null is not allowed
    return replace(
        rotary_decoder(
            config,
            default_heads=2,
            default_max=4096,
            eps=("norm_epsilon", 1e-5),
            act=("hidden_act", "gelu_pytorch_tanh"),
            tied=True,
        ),
        norm="layer",
        gated_ffn=False,
        **all_biases(config.flag("use_bias", True)),
        sliding_window=config.positive_or_null("sliding_window"),
    )


STARCODER2 = Family(
    name="starcoder2",
    readers={"starcoder2": ("Starcoder2ForCausalLM", _starcoder2)},
    names=replace(LLAMA, gate="", up="mlp.c_fc", down="mlp.c_proj"),
    keys=KEYS | all_biases("use_bias"),
)
