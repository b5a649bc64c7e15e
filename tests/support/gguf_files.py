"""Writes GGUF files of `transformers` models by the package `gguf`, in the layout of llama.cpp's converter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import transformers
from gguf import GGMLQuantizationType as Kind

ARCHITECTURES = {
    "gpt2": "gpt2",
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3_text": "gemma3",
}
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
    for key, parameter in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if (name := names.get_name(key, try_suffixes=(".weight", ".bias"))) is None:
            raise KeyError(key)
        array = parameter.float().numpy()
        if arch == "gpt2" and key.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
            array = array.T
        if arch == "gemma3" and key.endswith("norm.weight"):
            array = array + 1
        if arch == "llama" and ".q_proj." in key:
            array = _turned(array, config.num_attention_heads)
        if arch == "llama" and ".k_proj." in key:
            array = _turned(array, config.num_key_value_heads)
        found[name] = np.ascontiguousarray(array)
    return found


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
    if config.model_type == "gpt2":
        writer.add_feed_forward_length(config.n_inner or 4 * config.n_embd)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    else:
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_key_length(model.model.layers[0].self_attn.head_dim)
        writer.add_rope_dimension_count(model.model.layers[0].self_attn.head_dim)
        _add_rope(writer, config)
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
        writer.add_sliding_window(config.sliding_window)
        rope = rope["full_attention"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])


def _rope_factors(model: transformers.PreTrainedModel) -> dict[str, Array]:
    """Return the factors that the rotary frequencies of LLaMA 3.1 are divided by, as the converter writes them."""
    rope = getattr(model.config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "llama3":
        return {}
    scaled = model.model.rotary_emb.inv_freq.double().numpy()
    plain = rope["rope_theta"] ** (-np.arange(len(scaled)) / len(scaled))
    return {"rope_freqs.weight": (plain / scaled).astype(np.float32)}
