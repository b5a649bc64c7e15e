"""Command R: parallel attention and feed-forward, one bias-free LayerNorm; windows in most layers of R7B and A."""

from __future__ import annotations

from dataclasses import replace

from ...conf.architecture import Architecture
from ..model_config import ModelValues
from ..names import LLAMA
from ..rotary_config import RopeKeys
from .common import attention_biases, only, rotary_decoder, windows
from .family import Family

# Keys of published configs, with the only supported value.
_FIXED = {
    "order_of_interleaved_layers": "local_attn_first",
    "position_embedding_type": "rope_gptj",
    "rotary_pct": 1.0,
    "use_embedding_sharing": True,
    "use_gated_activation": True,
    "use_parallel_block": True,
}


def _cohere(config: ModelValues, theta: float = 500000.0) -> Architecture:
    if config.get("use_qk_norm", False):
        raise config.unsupported("use_qk_norm=true (LayerNorm of queries and keys, with a weight for each head)")
    return replace(
        rotary_decoder(
            config, default_max=8192, rope=RopeKeys(default_theta=theta), eps=("layer_norm_eps", 1e-5), tied=True
        ),
        norm="layer_scale",
        norms="shared",
        **attention_biases(config),
        logit_scale=config.number("logit_scale", 0.0625),
    )


def _cohere2(config: ModelValues) -> Architecture:
    only(config, _FIXED)
    config.asked |= {"layer_switch", "use_parallel_embedding"}
    if "head_dim" in config.values:
        config.positive("head_dim")  # null is not allowed
    arch, pattern = _cohere(config, 10000.0), config.positive("sliding_window_pattern", 4)
    window = config.positive_or_null("sliding_window", 4096)
    return windows(config, arch, window, lambda i: (i + 1) % pattern != 0, full_turns=False)


COHERE = Family(
    name="cohere",
    readers={"cohere": ("CohereForCausalLM", _cohere), "cohere2": ("Cohere2ForCausalLM", _cohere2)},
    names=replace(LLAMA, neighbours_turn=True),
)
