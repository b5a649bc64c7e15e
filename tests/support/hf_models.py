"""Small Hugging Face models with random weights, made on the spot; their greedy continuations are the truth."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import transformers

VOCAB = 307  # odd: tensor parallel ranks pad it
# Wide enough that no two logits of the best tokens come close.
COMMON = {"vocab_size": VOCAB, "initializer_range": 0.2, "bos_token_id": None, "eos_token_id": None}
LLAMA = {
    **COMMON,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,  # two stages hold 2 and 1
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
MIXED = ("sliding_attention", "full_attention", "sliding_attention")
EXPERTS = {"num_experts_per_tok": 3, "moe_intermediate_size": 24}

CONFIGS: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "mixtral": lambda: transformers.MixtralConfig(
        **LLAMA, num_local_experts=6, num_experts_per_tok=2, sliding_window=13
    ),
    "qwen2-moe": lambda: transformers.Qwen2MoeConfig(
        **LLAMA,
        **EXPERTS,
        num_experts=8,
        shared_expert_intermediate_size=56,
        norm_topk_prob=True,
        mlp_only_layers=[1],
    ),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(
        **LLAMA, **EXPERTS, num_experts=8, head_dim=32, decoder_sparse_step=2, norm_topk_prob=True
    ),
    "deepseek-v3": lambda: transformers.DeepseekV3Config(
        **{**LLAMA, "num_key_value_heads": 4},
        **EXPERTS,
        n_routed_experts=8,
        n_group=4,
        topk_group=2,
        n_shared_experts=2,
        first_k_dense_replace=1,
        kv_lora_rank=32,
        q_lora_rank=24,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        routed_scaling_factor=2.5,
        rope_parameters=dict(YARN),
    ),
    "gpt2": lambda: transformers.GPT2Config(
        **COMMON, n_embd=64, n_layer=3, n_head=4, n_positions=256, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    ),
    "llama": lambda: transformers.LlamaConfig(**{**LLAMA, "num_key_value_heads": 4}),
    "llama-grouped": lambda: transformers.LlamaConfig(**LLAMA),
    "mistral": lambda: transformers.MistralConfig(**LLAMA, sliding_window=13, head_dim=16),
    "qwen2": lambda: transformers.Qwen2Config(**LLAMA, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**LLAMA, head_dim=32),
    "qwen2-windows": lambda: transformers.Qwen2Config(
        **LLAMA, use_sliding_window=True, sliding_window=13, max_window_layers=2
    ),
    "ministral": lambda: transformers.MinistralConfig(
        **LLAMA,
        head_dim=16,
        sliding_window=13,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "gemma2": lambda: transformers.Gemma2Config(
        **LLAMA,
        head_dim=32,
        sliding_window=13,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=9.0,
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **LLAMA,
        head_dim=32,
        sliding_window=13,
        query_pre_attn_scalar=24,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    ),
    "phi3": lambda: transformers.Phi3Config(
        **LLAMA,
        sliding_window=40,
        original_max_position_embeddings=256,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1000.0,
            "partial_rotary_factor": 0.75,
            "attention_factor": 1.2,
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
            "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 8.0],
        },
    ),
    "olmo2": lambda: transformers.Olmo2Config(**LLAMA),
    "granite": lambda: transformers.GraniteConfig(
        **LLAMA,
        attention_bias=True,
        embedding_multiplier=3.0,
        residual_multiplier=0.4,
        attention_multiplier=0.1,
        logits_scaling=0.5,
    ),
    "smollm3": lambda: transformers.SmolLM3Config(**LLAMA, no_rope_layers=[1, 0, 1]),
    "stablelm": lambda: transformers.StableLmConfig(**LLAMA, use_qkv_bias=True),
    "stablelm-parallel": lambda: transformers.StableLmConfig(**LLAMA, use_parallel_residual=True),
    "glm": lambda: transformers.GlmConfig(**{**LLAMA, "eos_token_id": 306}, head_dim=16),
    "glm4": lambda: transformers.Glm4Config(**{**LLAMA, "eos_token_id": 306}, head_dim=16),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**{k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}),
    "falcon": lambda: transformers.FalconConfig(**FALCON, new_decoder_architecture=True, num_kv_heads=2, bias=True),
    "falcon-shared": lambda: transformers.FalconConfig(**FALCON, multi_query=False),
    "seed-oss": lambda: transformers.SeedOssConfig(**LLAMA, head_dim=32, attention_out_bias=True, mlp_bias=True),
    "ernie": lambda: transformers.Ernie4_5Config(**LLAMA, head_dim=32, use_bias=True),
    "cohere": lambda: transformers.CohereConfig(**LLAMA, attention_bias=True),
    "cohere2": lambda: transformers.Cohere2Config(**LLAMA, sliding_window=13, layer_types=list(MIXED)),
    "starcoder2": lambda: transformers.Starcoder2Config(**LLAMA, sliding_window=13),
    "exaone4": lambda: transformers.Exaone4Config(**LLAMA, sliding_window=13, layer_types=list(MIXED)),
    "nemotron": lambda: transformers.NemotronConfig(**LLAMA, head_dim=24, mlp_bias=True),
    "olmo": lambda: transformers.OlmoConfig(**LLAMA, attention_bias=True),
    "olmo3": lambda: transformers.Olmo3Config(
        **LLAMA,
        sliding_window=13,
        layer_types=list(MIXED),
        rope_parameters={
            "full_attention": {**YARN, "rope_theta": 5000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    ),
    "arcee": lambda: transformers.ArceeConfig(**LLAMA, mlp_bias=True),
    "phi": lambda: transformers.PhiConfig(**LLAMA),
}
PLAIN = ("gpt2", "llama", "llama-grouped", "mistral", "qwen2", "qwen3")  # without a trait that another has not
FALCON = {
    **COMMON,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": None,
}


def make_model(name: str, folder: Path) -> transformers.PreTrainedModel:
    """Save the model as safetensors to `folder` and return it in fp32."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation="eager")
    for parameter in model.parameters():  # biases and norms too, which start as zeros and ones
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, mean=parameter.detach().mean().item(), std=0.1)
    model.float().eval().save_pretrained(folder)
    return model


def greedy(model: transformers.PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            pad_token_id=0,
        )
    return out[0, len(prompt) :].tolist()
