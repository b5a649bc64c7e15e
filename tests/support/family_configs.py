"""A config.json of each family as published ones are, but of a small model: those of experts, and the dense ones."""

from __future__ import annotations

from typing import Any

from .dense_configs import CONFIGS as DENSE
from .dense_configs import QWEN, SIZES

EXPERT_SIZES: dict[str, Any] = SIZES | {"attention_bias": False, "attention_dropout": 0.0, "num_experts_per_tok": 2}
DEEPSEEK: dict[str, Any] = EXPERT_SIZES | {
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 12,
    "moe_intermediate_size": 20,
    "moe_layer_freq": 1,
    "n_group": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_key_value_heads": 4,
    "pretraining_tp": 1,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 4.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        "original_max_position_embeddings": 32,
        "type": "yarn",
    },
    "seq_aux": True,
    "topk_group": 2,
    "v_head_dim": 6,
}
CONFIGS: dict[str, dict[str, Any]] = DENSE | {
    "mixtral": EXPERT_SIZES
    | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "head_dim": 8,
        "num_local_experts": 6,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
    },
    "qwen2_moe": EXPERT_SIZES
    | QWEN
    | {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 20,
        "norm_topk_prob": False,
        "num_experts": 8,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 24,
    },
    "qwen3_moe": EXPERT_SIZES
    | QWEN
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "head_dim": 16,
        "moe_intermediate_size": 20,
        "norm_topk_prob": True,
        "num_experts": 8,
        "output_router_logits": False,
        "rope_scaling": None,
        "router_aux_loss_coef": 0.001,
    },
    "deepseek_v2": DEEPSEEK
    | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.5,
        "scoring_func": "softmax",
        "topk_method": "group_limited_greedy",
    },
    "deepseek_v3": DEEPSEEK
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 1,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
    "glm4_moe": EXPERT_SIZES
    | {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "attention_bias": True,
        "first_k_dense_replace": 1,
        "head_dim": 16,
        "moe_intermediate_size": 20,
        "n_group": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 1,
        "pad_token_id": 3,
        "partial_rotary_factor": 0.5,
        "rope_scaling": None,
        "routed_scaling_factor": 1.5,
        "topk_group": 1,
        "use_qk_norm": True,
    },
    "minimax_m2": {k: v for k, v in EXPERT_SIZES.items() if k != "attention_bias"}
    | {
        "architectures": ["MiniMaxM2ForCausalLM"],
        "model_type": "minimax_m2",
        "attn_type_list": [1, 1],
        "head_dim": 16,
        "layernorm_full_attention_beta": 1.0,
        "layernorm_linear_attention_beta": 1.0,
        "layernorm_mlp_beta": 1.0,
        "mlp_intermediate_size": 64,
        "mtp_transformer_layers": 1,
        "num_local_experts": 8,
        "num_mtp_modules": 3,
        "output_router_logits": False,
        "qk_norm_type": "per_layer",
        "rotary_dim": 8,
        "router_aux_loss_coef": 0.001,
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 0,
        "shared_moe_mode": "sigmoid",
        "use_mtp": True,
        "use_qk_norm": True,
        "use_routing_bias": True,
    },
    "gpt_oss": EXPERT_SIZES
    | {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "experts_per_token": 2,
        "head_dim": 16,
        "initial_context_length": 64,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_local_experts": 8,
        "output_router_logits": False,
        "pad_token_id": 3,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "rope_type": "yarn",
            "truncate": False,
        },
        "router_aux_loss_coef": 0.9,
        "sliding_window": 9,
        "swiglu_limit": 1.5,
    },
    "ernie4_5_moe": SIZES
    | {
        "architectures": ["Ernie4_5_MoeForCausalLM"],
        "model_type": "ernie4_5_moe",
        "moe_capacity": [64, 64, 64],
        "moe_gate": "topk",
        "moe_intermediate_size": 20,
        "moe_k": 2,
        "moe_layer_end_index": 1,
        "moe_layer_interval": 1,
        "moe_layer_start_index": 1,
        "moe_num_experts": 8,
        "moe_num_shared_experts": 2,
        "moe_use_aux_free": True,
        "num_nextn_predict_layers": 1,
        "rope_scaling": None,
        "rope_theta": 5000.0,
        "tie_word_embeddings": True,
        "use_bias": False,
    },
    "olmoe": EXPERT_SIZES
    | {
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "clip_qkv": None,
        "norm_topk_prob": False,
        "num_experts": 8,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.01,
    },
}
