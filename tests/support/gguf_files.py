"""Writes GGUF files of `transformers` models by the package `gguf`, in the layout of llama.cpp's converter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
import transformers
from gguf import GGMLQuantizationType as Kind

ARCHITECTURES = {
    "gpt2": "gpt2",
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "phi3": "phi3",
    "olmo2": "olmo2",
    "granite": "granite",
    "smollm3": "smollm3",
    "stablelm": "stablelm",
    "glm4": "glm4",
    "falcon": "falcon",
    "glm4_moe": "glm4moe",
    "minimax_m2": "minimax-m2",
    "glm": "chatglm",
    "gpt_neox": "gptneox",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "gpt_oss": "gpt-oss",
    "seed_oss": "seed_oss",
    "ernie4_5": "ernie4_5",
    "ernie4_5_moe": "ernie4_5-moe",
    "cohere": "command-r",
    "cohere2": "cohere2",
    "starcoder2": "starcoder2",
    "exaone4": "exaone4",
    "nemotron": "nemotron",
    "olmo": "olmo",
    "olmo3": "olmo2",
    "olmoe": "olmoe",
    "arcee": "arcee",
    "dots1": "dots1",
    "granitemoe": "granitemoe",
    "phi": "phi2",
}
_NEIGHBOURS_TURN = ("llama", "granite", "granitemoe", "smollm3", "mistral3", "arcee", "olmo", "minicpm", "internlm2")
_EPS = ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
_ENUMS = {name: member for member, name in gguf.MODEL_ARCH_NAMES.items()}
Array = npt.NDArray[Any]
PAGE = (
    "A river rises in a valley of wet meadows, where three springs meet below the village church. For its first thirty "
    "kilometres it is little more than a stream, and children cross it on stones. Below the first town it is joined by "
    "two larger brooks, and from there on it turns mills, of which eleven stood along its banks two hundred years ago."
)


def converted(model: transformers.PreTrainedModel, arch: str | None = None) -> dict[str, Array]:
    """Return the tensors of a model under llama.cpp's names and in its layout, as one of `arch`."""
    config = model.config
    arch = arch or ARCHITECTURES[config.model_type]
    names = gguf.get_tensor_name_map(_ENUMS[arch], config.num_hidden_layers)
    found = {}
    for key, parameter in _by_part(model):
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if (name := names.get_name(key, try_suffixes=(".weight", ".bias"))) is None:
            raise KeyError(key)
        array = parameter.float().squeeze().numpy()
        if arch == "gpt2" and key.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
            array = array.T
        if arch in ("gemma2", "gemma3", "nemotron") and key.endswith("norm.weight"):
            array = array + 1
        if arch in _NEIGHBOURS_TURN and ".q_proj." in key:
            array = _turned(array, config.num_attention_heads)
        if arch in _NEIGHBOURS_TURN and ".k_proj." in key:
            array = _turned(array, config.num_key_value_heads)
        if ".query_key_value." in key:
            heads, kv_heads = config.num_attention_heads, _kv_heads(config)
            groups = array.reshape(kv_heads, heads // kv_heads + 2, config.hidden_size // heads, *array.shape[1:])
            parts = (groups[:, :-2], groups[:, -2], groups[:, -1])
            array = np.concatenate([part.reshape(-1, *array.shape[1:]) for part in parts])
        found[name] = np.ascontiguousarray(array)
    return found


def _by_part(model: transformers.PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a model, its experts' gate and up projections as two of them."""
    config = model.config
    for name, parameter in model.state_dict().items():
        key = name.replace("block_sparse_moe.experts", "mlp.experts")
        if config.model_type == "gpt_oss" and ".experts." in key:
            end = ".bias" if key.endswith("_bias") else ".weight"
            base, part = key.removesuffix("_bias"), parameter if end == ".bias" else parameter.transpose(1, 2)
            if "gate_up" in key:
                yield base.replace("gate_up", "gate") + end, part[:, ::2]
                yield base.replace("gate_up", "up") + end, part[:, 1::2]
            else:
                yield base + end, part
        elif key.endswith("kv_b_proj.weight"):
            heads = parameter.view(config.num_attention_heads, -1, parameter.shape[1])
            keys, values = heads.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
            yield key.replace("kv_b", "k_b"), keys.transpose(1, 2)
            yield key.replace("kv_b", "v_b"), values
        elif key.endswith("sinks"):
            yield f"{key}.weight", parameter
        elif key.endswith("experts.gate_up_proj"):
            for half, part in zip(("gate_proj", "up_proj"), parameter.chunk(2, dim=1), strict=True):
                yield key.replace("gate_up_proj", f"{half}.weight"), part
        elif key.endswith("e_score_correction_bias"):  # the converter's names
            yield key.removesuffix("_bias").replace("gate.moe_statics", "moe_statics") + ".bias", parameter
        elif key.endswith("block_sparse_moe.router.weight"):
            yield key.replace("router", "router.layer"), parameter
        else:
            yield f"{key}.weight" if key.endswith("experts.down_proj") else key, parameter


def _kv_heads(config: transformers.PretrainedConfig) -> int:
    if config.model_type == "gpt_neox":
        return int(config.num_attention_heads)
    if config.model_type.startswith("deepseek"):
        return 1
    if config.model_type != "falcon":
        return int(config.num_key_value_heads)
    if config.new_decoder_architecture:
        return int(config.num_kv_heads)
    return 1 if config.multi_query else int(config.num_attention_heads)


def _turned(array: Array, heads: int) -> Array:
    """Put the rows of a head's two halves by turns."""
    halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)


def write_gguf(
    path: Path,
    model: transformers.PreTrainedModel,
    kind: Kind = Kind.F32,
    *,
    arch: str | None = None,
    more: Mapping[str, Array] | None = None,
    blocks: Mapping[str, tuple[Array, Kind]] | None = None,
    change: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    tensors: Callable[[dict[str, Array]], dict[str, Array]] = lambda arrays: arrays,
    per_part: int = 0,
) -> Path:
    """Write a model's GGUF file, its matrices as `kind`, as one of `arch` where this is not that of its kind.

    `change` adds fields, `more` tensors, `blocks` tensors of another type, and `tensors` changes those of the model.
    With `per_part` tensors a file it is split, and the path returned is that of the first part.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, arch or ARCHITECTURES[config.model_type], split_max_tensors=per_part)
    writer.add_type("model")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    of = config.model_type
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        writer.add_layer_norm_eps(next((getattr(config, eps) for eps in _EPS if hasattr(config, eps)), 1e-5))
    if of == "gpt2":
        writer.add_feed_forward_length(config.n_inner or 4 * config.n_embd)
    else:
        writer.add_feed_forward_length(config.ffn_hidden_size if of == "falcon" else config.intermediate_size)
        writer.add_head_count_kv(_kv_heads(config))
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        rope = config.rope_parameters.get("full_attention", config.rope_parameters)
        if not of.startswith("deepseek"):
            writer.add_key_length(head_dim)
            writer.add_value_length(head_dim)
            writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
        _add_rope(writer, config)
        _add_own(writer, config)
    change(writer)
    for name, array in {**tensors(converted(model, arch)), **_rope_factors(model), **(more or {})}.items():
        if name in (blocks or {}):
            continue
        of = kind if array.ndim > 1 else Kind.F32
        writer.add_tensor(name, gguf.quantize(array, of), raw_dtype=of)
    for name, (array, of) in (blocks or {}).items():
        writer.add_tensor(name, array, raw_dtype=of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))[0] if per_part else path


def _add_rope(writer: gguf.GGUFWriter, config: transformers.PretrainedConfig) -> None:
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    if "sliding_attention" in config.rope_parameters:
        writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "mscale_all_dim" in rope:
            own = 0.1 if config.model_type.startswith("deepseek") else 1.0
            writer.add_rope_scaling_yarn_log_mul(own * rope["mscale_all_dim"])


def _add_own(writer: gguf.GGUFWriter, config: transformers.PretrainedConfig) -> None:
    """Add what only some models have."""
    kind = config.model_type
    if kind in ("glm", "glm4"):
        writer.add_eos_token_id(config.eos_token_id)
    if kind in ("gemma2", "gemma3_text", "phi3", "cohere2", "gpt_oss", "exaone4", "olmo3") and config.sliding_window:
        writer.add_sliding_window(config.sliding_window)
    if kind in ("cohere2", "gpt_oss", "exaone4", "olmo3"):
        writer.add_sliding_window_pattern([of == "sliding_attention" for of in config.layer_types])
    if kind in ("cohere", "cohere2"):
        writer.add_logit_scale(config.logit_scale)
    if kind == "gpt_neox":
        writer.add_parallel_residual(config.use_parallel_residual)
    if kind == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if kind == "phi3":
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        writer.add_rope_scaling_attn_factors(config.rope_parameters["attention_factor"])
    if kind.startswith("granite"):
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if kind == "ernie4_5_moe":
        writer.add_expert_count(config.moe_num_experts)
        writer.add_expert_used_count(config.moe_k)
        writer.add_expert_shared_count(config.moe_num_shared_experts)
        writer.add_expert_shared_feed_forward_length(config.moe_num_shared_experts * config.moe_intermediate_size)
        writer.add_leading_dense_block_count(config.moe_layer_start_index)
        writer.add_interleave_moe_layer_step(config.moe_layer_interval)
    elif "num_experts_per_tok" in config:
        keys = ("num_local_experts", "n_routed_experts", "num_experts")
        writer.add_expert_count(next(getattr(config, key) for key in keys if hasattr(config, key)))
        writer.add_expert_used_count(config.num_experts_per_tok)
    if hasattr(config, "moe_intermediate_size") or kind == "gpt_oss":
        writer.add_expert_feed_forward_length(getattr(config, "moe_intermediate_size", config.intermediate_size))
    if hasattr(config, "first_k_dense_replace"):
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
    if kind in ("deepseek_v2", "deepseek_v3", "dots1"):
        func = gguf.ExpertGatingFuncType
        writer.add_expert_gating_func(func.SOFTMAX if kind == "deepseek_v2" else func.SIGMOID)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
    if kind.startswith("deepseek"):
        if config.q_lora_rank:
            writer.add_q_lora_rank(config.q_lora_rank)
        writer.add_kv_lora_rank(config.kv_lora_rank)
        writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
        writer.add_value_length(config.kv_lora_rank)
        writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
        writer.add_value_length_mla(config.v_head_dim)
        writer.add_rope_dimension_count(config.qk_rope_head_dim)
    if kind == "qwen2_moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def _rope_factors(model: transformers.PreTrainedModel) -> dict[str, Array]:
    """Return the factors that rotary frequencies are divided by, as the converter writes them."""
    rope = getattr(model.config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        return {f"rope_factors_{of}.weight": np.asarray(rope[f"{of}_factor"], np.float32) for of in ("long", "short")}
    if rope.get("rope_type") != "llama3":
        return {}
    scaled = model.model.rotary_emb.inv_freq.double().numpy()
    plain = rope["rope_theta"] ** (-np.arange(len(scaled)) / len(scaled))
    return {"rope_freqs.weight": (plain / scaled).astype(np.float32)}
