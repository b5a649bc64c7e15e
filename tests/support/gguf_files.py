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
}
_LAYER_NORM = ("gpt2", "stablelm", "falcon")
_ENUMS = {name: member for member, name in gguf.MODEL_ARCH_NAMES.items()}
Array = npt.NDArray[Any]
PAGE = (
    "A river rises in a valley of wet meadows, where three springs meet below the village church. For its first thirty "
    "kilometres it is little more than a stream, and children cross it on stones. Below the first town it is joined by "
    "two larger brooks, and from there on it turns mills, of which eleven stood along its banks two hundred years ago."
)


def converted(model: transformers.PreTrainedModel) -> dict[str, Array]:
    """Return the tensors of a model under llama.cpp's names and in its layout."""
    config = model.config
    arch = ARCHITECTURES[config.model_type]
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
        if arch in ("gemma2", "gemma3") and key.endswith("norm.weight"):
            array = array + 1
        if arch in ("llama", "granite", "smollm3") and ".q_proj." in key:
            array = _turned(array, config.num_attention_heads)
        if arch in ("llama", "granite", "smollm3") and ".k_proj." in key:
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
    for key, parameter in model.state_dict().items():
        if key.endswith("experts.gate_up_proj"):
            for name, part in zip(("gate_proj", "up_proj"), parameter.chunk(2, dim=1), strict=True):
                yield key.replace("gate_up_proj", f"{name}.weight"), part
        elif key.endswith("e_score_correction_bias"):  # the converter's names
            yield key.removesuffix("_bias") + ".bias", parameter
        else:
            yield f"{key}.weight" if key.endswith("experts.down_proj") else key, parameter


def _kv_heads(config: transformers.PretrainedConfig) -> int:
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
    more: Mapping[str, Array] | None = None,
    blocks: Mapping[str, tuple[Array, Kind]] | None = None,
    change: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> Path:
    """Write a model's GGUF file, its matrices as `kind`.

    `change` adds fields, `more` tensors, `blocks` tensors of another type.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, ARCHITECTURES[config.model_type])
    writer.add_type("model")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    of = config.model_type
    if of in _LAYER_NORM:
        writer.add_layer_norm_eps(config.layer_norm_eps if of == "stablelm" else config.layer_norm_epsilon)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if of == "gpt2":
        writer.add_feed_forward_length(config.n_inner or 4 * config.n_embd)
    else:
        writer.add_feed_forward_length(config.ffn_hidden_size if of == "falcon" else config.intermediate_size)
        writer.add_head_count_kv(_kv_heads(config))
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        writer.add_key_length(head_dim)
        turned = config.rope_parameters.get("partial_rotary_factor", 1.0)
        writer.add_rope_dimension_count(int(head_dim * turned))
        _add_rope(writer, config)
        _add_own(writer, config)
    change(writer)
    for name, array in {**converted(model), **_rope_factors(model), **(more or {})}.items():
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
    return path


def _add_rope(writer: gguf.GGUFWriter, config: transformers.PretrainedConfig) -> None:
    rope = config.rope_parameters
    if config.model_type == "gemma3_text":
        rope = rope["full_attention"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])


def _add_own(writer: gguf.GGUFWriter, config: transformers.PretrainedConfig) -> None:
    """Add what only some models have."""
    kind = config.model_type
    if kind == "glm4":
        writer.add_eos_token_id(config.eos_token_id)
    if kind in ("gemma2", "gemma3_text", "phi3"):
        writer.add_sliding_window(config.sliding_window)
    if kind == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if kind == "phi3":
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        writer.add_rope_scaling_attn_factors(config.rope_parameters["attention_factor"])
    if kind == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if "num_experts_per_tok" in config:
        key = {"mixtral": "num_local_experts", "minimax_m2": "num_local_experts", "glm4_moe": "n_routed_experts"}
        writer.add_expert_count(getattr(config, key.get(kind, "num_experts")))
        writer.add_expert_used_count(config.num_experts_per_tok)
    if kind.endswith("_moe"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if kind == "glm4_moe":
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
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
