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
EXPERTS = {"num_experts_per_tok": 3, "moe_intermediate_size": 24}

CONFIGS: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "gpt2": lambda: transformers.GPT2Config(
        **COMMON, n_embd=64, n_layer=3, n_head=4, n_positions=256, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    ),
    "llama": lambda: transformers.LlamaConfig(**{**LLAMA, "num_key_value_heads": 4}),
    "llama-grouped": lambda: transformers.LlamaConfig(**LLAMA),
    "mistral": lambda: transformers.MistralConfig(**LLAMA, sliding_window=13, head_dim=16),
    "qwen2": lambda: transformers.Qwen2Config(**LLAMA, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**LLAMA, head_dim=32),
    "mixtral": lambda: transformers.MixtralConfig(**LLAMA, num_local_experts=6, num_experts_per_tok=2),
    "qwen2-moe": lambda: transformers.Qwen2MoeConfig(
        **LLAMA,
        **EXPERTS,
        num_experts=8,
        shared_expert_intermediate_size=56,
        norm_topk_prob=True,
        mlp_only_layers=[1],
    ),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(
        **LLAMA, **EXPERTS, num_experts=8, head_dim=32, decoder_sparse_step=2
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
    ),
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
