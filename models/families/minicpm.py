"""MiniCPM 1 and 2: a LLaMA with multipliers. Source: modeling_minicpm.py of openbmb/MiniCPM-2B-sft-bf16."""

from __future__ import annotations

from typing import Any

from ..model_config import ModelValues
from .common import attention_biases, rotary
from .family import Family


def _minicpm(config: ModelValues) -> dict[str, Any]:
    fields = rotary(config, default_max=2048, tied=True)
    return fields | {
        **attention_biases(config),
        "embedding_scale": config.number("scale_emb", 1.0),
        "residual_scale": config.number("scale_depth", 1.0) / fields["num_layers"] ** 0.5,
        "logit_scale": config.number("dim_model_base", 1.0) / fields["hidden_size"],
    }


MINICPM = Family(
    name="minicpm",
    readers={"minicpm": ("MiniCPMForCausalLM", _minicpm)},
    about="MiniCPM 1 and 2, dense",
    refused="MiniCPM 3 (latent attention), MiniCPM 4 (sparse attention)",
)
