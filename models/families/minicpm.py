"""MiniCPM 1 and 2: a LLaMA with multipliers. Source: modeling_minicpm.py of openbmb/MiniCPM-2B-sft-bf16."""

from __future__ import annotations

from dataclasses import replace

from ...conf.architecture import Architecture
from ..model_config import ModelValues
from .common import attention_biases, rotary_decoder
from .family import Family


def _minicpm(config: ModelValues) -> Architecture:
    arch = rotary_decoder(config, default_max=2048, tied=True)
    return replace(
        arch,
        **attention_biases(config),
        embedding_scale=config.number("scale_emb", 1.0),
        residual_scale=config.number("scale_depth", 1.0) / arch.num_layers**0.5,
        logit_scale=config.number("dim_model_base", 1.0) / arch.hidden_size,
    )


MINICPM = Family(
    name="minicpm",
    readers={"minicpm": ("MiniCPMForCausalLM", _minicpm)},
    about="MiniCPM 1 and 2, dense",
    refused="MiniCPM 3 (MLA), MiniCPM 4 (sparse attention)",
)
