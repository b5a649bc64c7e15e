"""Configs of small models of experts, with those that `hf_models` has."""

from __future__ import annotations

from typing import Any

import transformers

from .hf_models import CONFIGS, YARN

COMMON: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 3, "moe_intermediate_size": 20}
LATENT: dict[str, Any] = {
    **COMMON | {"num_key_value_heads": 4},
    **EXPERTS,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
FAMILIES: dict[str, transformers.PretrainedConfig] = {
    **{name: CONFIGS[name]() for name in ("mixtral", "qwen2-moe", "qwen3-moe", "deepseek-v3")},
    "deepseek-v2": transformers.DeepseekV2Config(
        **LATENT | {"q_lora_rank": None},
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        attention_bias=True,
    ),
    "deepseek-v2-yarn": transformers.DeepseekV2Config(**LATENT, topk_method="greedy", rope_parameters=YARN),
    "glm4-moe": transformers.Glm4MoeConfig(
        **COMMON, **EXPERTS, n_routed_experts=8, head_dim=16, use_qk_norm=True, attention_bias=True, n_shared_experts=2
    ),
    "minimax-m2": transformers.MiniMaxM2Config(
        **COMMON, num_experts_per_tok=3, num_local_experts=8, head_dim=16, rotary_dim=8
    ),
    "gpt-oss": transformers.GptOssConfig(
        **COMMON, num_experts_per_tok=3, num_local_experts=8, head_dim=16, sliding_window=9, swiglu_limit=1.5
    ),
    "ernie-moe": transformers.Ernie4_5_MoeConfig(
        **COMMON, moe_intermediate_size=20, moe_k=3, moe_num_experts=8, tie_word_embeddings=False
    ),
    "olmoe": transformers.OlmoeConfig(**COMMON, num_experts_per_tok=3, num_experts=8),
    "granite-moe": transformers.GraniteMoeConfig(
        **COMMON,
        num_experts_per_tok=3,
        num_local_experts=8,
        embedding_multiplier=3.0,
        residual_multiplier=0.4,
        attention_multiplier=0.1,
        logits_scaling=0.5,
    ),
    "dots1": transformers.Dots1Config(
        **COMMON,
        **EXPERTS,
        n_routed_experts=8,
        n_group=4,
        topk_group=2,
        n_shared_experts=2,
        first_k_dense_replace=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        sliding_window=9,
        max_window_layers=2,
    ),
}
