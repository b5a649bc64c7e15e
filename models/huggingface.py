"""Finds a model's Hugging Face folder or GGUF file and reads the architecture from it. Imports no torch.

A feature that this package does not compute exactly is refused by name. Models of experts are read too, for
simulations; `runtime/engine/plan.py` refuses them where they would be computed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from ..conf import strict_json
from ..conf.errors import ConfigError, nearest
from ..conf.experts import ExpertsConfig
from ..conf.schema import NAMED_WEIGHTS, Architecture, ModelConfig, RopeScaling, is_hub_name
from .gguf.config import config_values
from .gguf.file import open_gguf
from .gguf.smollm2 import smollm2
from .hub import of_cache_folder, snapshot

_SIZE_FIELDS = ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "ffn_size")
_ACTIVATIONS: dict[str, Literal["silu", "gelu", "gelu_tanh", "relu"]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}

_NAMED = ", ".join(NAMED_WEIGHTS[:-1]) + f" or {NAMED_WEIGHTS[-1]}"
_DTYPES = ("float32", "bfloat16", "float16", "float64", "float", "half", "auto")  # of the weights; read as any


def resolve_weights(model: ModelConfig, *, tensors: bool = True) -> Path | None:
    """Return the folder or GGUF file that holds the weights; None for random weights.

    Args:
        model: names the folder or file, or random weights.
        tensors: there must be tensors too; a simulation of a folder needs config.json alone.

    Raises:
        ConfigError: the folder or file is missing, or lacks what loading needs.
    """
    if model.weights == "random":
        return None
    if model.weights == "shipped":
        folder = Path(__file__).parent / "shipped"
        if not (folder / "config.json").is_file():
            raise ConfigError(f"model.weights=shipped: this installation holds no model in {folder}")
        return folder
    if model.weights == "smollm2":
        return smollm2()
    path = Path(model.weights).expanduser()
    if is_hub_name(model.weights):
        path = snapshot(model.weights, model.revision, tensors=tensors)
    key = f"model.weights={model.weights}"
    if path.is_file() and path.suffix == ".gguf":
        return path
    if not path.exists():
        raise ConfigError(f"{key}: no such folder; must be a Hugging Face folder or name, a GGUF file or {_NAMED}")
    path = of_cache_folder(path)
    if not path.is_dir():
        raise ConfigError(f"{key}: a file; must be the folder that holds config.json and the safetensors files")
    has_tensors = any(path.glob("*.safetensors")) or (path / "model.safetensors.index.json").is_file()
    if not has_tensors and (alone := _only_gguf(path, key)) is not None:
        return alone
    if not (path / "config.json").is_file():
        raise ConfigError(f"{key}: no config.json in this folder; must be a Hugging Face folder")
    if tensors and not has_tensors:
        pickles = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in path.glob(pattern))
        if pickles:
            raise ConfigError(f"{key}: only pickle files ({pickles[0]}), which may run code; convert to safetensors")
        raise ConfigError(f"{key}: no safetensors file in this folder")
    return path


def _only_gguf(folder: Path, key: str) -> Path | None:
    """Return the folder's one GGUF file; None where it has none."""
    files = sorted(folder.glob("*.gguf"))
    if len(files) > 1:
        raise ConfigError(f"{key}: several GGUF files; give one of {', '.join(file.name for file in files)}")
    return files[0] if files else None


def resolve_architecture(model: ModelConfig, *, tensors: bool = True) -> Architecture:
    """Return the architecture from the folder's config.json, or `model.architecture` for random weights.

    `model.max_model_len` replaces its `max_position`.

    Args:
        model: names the folder, or gives the architecture.
        tensors: as of `resolve_weights`.

    Raises:
        ConfigError: the architecture is unknown, has a feature that is not supported, or contradicts `model`.
    """
    folder = resolve_weights(model, tensors=tensors)
    if folder is None:
        assert model.architecture is not None
        arch = model.architecture
    else:
        arch = _read_architecture(folder)
        if model.architecture is not None:
            for size in _SIZE_FIELDS:
                given, found = getattr(model.architecture, size), getattr(arch, size)
                if given != found:
                    raise ConfigError(
                        f"model.architecture.{size}={given}: {folder} says {found}; leave model.architecture out "
                        "for a folder or file"
                    )
    if model.max_model_len is None:
        return arch
    if model.max_model_len > arch.max_position:
        raise ConfigError(f"model.max_model_len={model.max_model_len}: must be at most the model's {arch.max_position}")
    return replace(arch, max_position=model.max_model_len)


class _Config:
    """The values of a config.json, with checked access by key. An error names the key and the file."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path = path
        self.values = values

    @classmethod
    def read(cls, path: Path) -> _Config:
        try:
            values = strict_json.loads(path.read_text(encoding="utf-8"))
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: not readable as JSON ({error})") from error
        if not isinstance(values, dict):
            raise ConfigError(f"{path}: must hold a JSON object")
        return cls(path, values)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, or `default` where the key is missing or null."""
        value = self.values.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ConfigError(f"{self.path}: {key}={value!r}: must be an integer")
        return value

    def positive(self, key: str, default: int | None = None) -> int:
        value = self.integer(key, default)
        if value < 1:
            raise ConfigError(f"{self.path}: {key}={value}: must be 1 or more")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < sys.float_info.max:
            raise ConfigError(f"{self.path}: {key}={value!r}: must be a number above 0")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise ConfigError(f"{self.path}: {key}={value!r}: must be true or false")
        return value

    def activation(self, key: str, default: str) -> Literal["silu", "gelu", "gelu_tanh", "relu"]:
        name = str(self.get(key, default))
        if name not in _ACTIVATIONS:
            raise ConfigError(f"{self.path}: {key}={name}: not supported{nearest(name, _ACTIVATIONS)}")
        return _ACTIVATIONS[name]

    def names(self, key: str) -> list[str]:
        value = self.get(key, [])
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise ConfigError(f"{self.path}: {key}={value!r}: must be a list of names")
        return value

    def unsupported(self, what: str) -> ConfigError:
        """Return the error for a feature that is not supported."""
        return ConfigError(f"{self.path}: {what} is not supported")


def _read_architecture(path: Path) -> Architecture:
    """Read the architecture of a folder or of a GGUF file."""
    config = _Config(path, config_values(open_gguf(path))) if path.is_file() else _Config.read(path / "config.json")
    named = config.names("architectures")
    name = named[0] if named else _NAME_BY_MODEL_TYPE.get(str(config.get("model_type")))
    if name in _NOT_MODELLED:
        raise config.unsupported(f"architecture {name} ({_NOT_MODELLED[name]})")
    if name not in _READERS:
        found = name or f"model_type {config.get('model_type')!r}"
        raise ConfigError(f"{config.path}: architecture {found} is not supported; supported: {', '.join(_READERS)}")
    if config.get("quantization_config") is not None:
        raise config.unsupported("quantization_config (quantized weights)")
    fields = _READERS[name](config) | {"bos_token_id": _first_id(config), "eos_token_ids": _eos_ids(config, path)}
    for key in ("torch_dtype", "dtype"):
        if (dtype := config.get(key, "auto")) not in _DTYPES:
            raise ConfigError(f"{config.path}: {key}={dtype!r}: must be one of {', '.join(_DTYPES)}")
    for token in fields["eos_token_ids"]:
        if not 0 <= token < fields["vocab_size"]:
            most = fields["vocab_size"] - 1
            raise ConfigError(f"{config.path}: eos_token_id={token}: must lie in 0 .. {most}, the vocabulary")
    try:
        return Architecture(**fields)
    except ConfigError as error:
        raise ConfigError(f"{config.path}: {error}") from error


def _first_id(config: _Config) -> int | None:
    value = config.get("bos_token_id")
    return value[0] if isinstance(value, list) and value else value if type(value) is int else None


def _eos_ids(config: _Config, folder: Path) -> tuple[int, ...]:
    """Return the end-of-sequence ids of config.json, and of generation_config.json where there is one."""
    configs = [config]
    if (folder / "generation_config.json").is_file():
        configs.append(_Config.read(folder / "generation_config.json"))
    ids: list[int] = []
    for each in configs:
        value = each.get("eos_token_id", [])
        ids += value if isinstance(value, list) else [value]
    if not all(type(i) is int for i in ids):
        raise ConfigError(f"{config.path}: eos_token_id={ids}: must be token ids")
    return tuple(dict.fromkeys(ids))


def _rotary(
    config: _Config, *, default_heads: int | None, default_head_dim: int | None, default_max: int
) -> dict[str, Any]:
    """Read the fields of an `Architecture` that LLaMA, Mistral and Qwen share."""
    hidden, heads = config.integer("hidden_size"), config.positive("num_attention_heads")
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        raise config.unsupported(f"partial_rotary_factor={config.get('partial_rotary_factor')}")
    kv_heads = default_heads if "num_key_value_heads" not in config.values else None
    head_dim = config.positive("head_dim", default_head_dim or hidden // heads)
    if head_dim % 2:
        raise ConfigError(f"{config.path}: head_dim={head_dim}: must be even, for rotary positions turn pairs")
    theta, scaling = _rope(config)
    return {
        "vocab_size": config.integer("vocab_size"),
        "hidden_size": hidden,
        "num_layers": config.integer("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": config.integer("num_key_value_heads", kv_heads or heads),
        "head_dim": head_dim,
        "ffn_size": config.integer("intermediate_size"),
        "max_position": config.integer("max_position_embeddings", default_max),
        "norm_eps": config.number("rms_norm_eps", 1e-6),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "activation": config.activation("hidden_act", "silu"),
        "tie_embeddings": config.flag("tie_word_embeddings", False),
    }


def _rope(config: _Config) -> tuple[float, RopeScaling | None]:
    """Read theta and the scaling from `rope_parameters` (transformers 5), or from `rope_theta` and `rope_scaling`."""
    values = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(values, dict):
        raise ConfigError(f"{config.path}: rope_parameters={values!r}: must be an object")
    rope = _Config(config.path, values)
    theta = rope.number("rope_theta", config.number("rope_theta", 10000.0))
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise config.unsupported(f"partial_rotary_factor={rope.get('partial_rotary_factor')}")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling(type="linear", factor=rope.number("factor", 1.0))
    if kind == "factors":  # of a GGUF file
        return theta, RopeScaling(type="factors", factors=tuple(rope.get("factors")))
    if kind == "llama3":
        low, high = rope.number("low_freq_factor", 1.0), rope.number("high_freq_factor", 4.0)
        if low >= high:
            raise ConfigError(f"{config.path}: low_freq_factor={low:g}: must be below high_freq_factor={high:g}")
        return theta, RopeScaling(
            type="llama3",
            factor=rope.number("factor", 8.0),
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_position=rope.integer("original_max_position_embeddings"),
        )
    raise config.unsupported(f"rope scaling {kind!r} (supported: linear, llama3)")


def _llama(config: _Config) -> dict[str, Any]:
    bias = config.flag("attention_bias", False)
    return {
        **_rotary(config, default_heads=None, default_head_dim=None, default_max=2048),
        "qkv_bias": bias,
        "attention_out_bias": bias,
        "ffn_bias": config.flag("mlp_bias", False),
    }


def _mistral(config: _Config) -> dict[str, Any]:
    if "sliding_attention" in (kinds := config.names("layer_types")) and "full_attention" in kinds:
        raise config.unsupported("layer_types that mix full and sliding attention")
    # Null means no window. A missing key means the published default, 4096.
    window = config.positive("sliding_window", 4096) if config.values.get("sliding_window", 0) is not None else None
    return {
        **_rotary(config, default_heads=8, default_head_dim=None, default_max=131072),
        "sliding_window": window,
    }


def _qwen_window(config: _Config) -> int | None:
    """Return the sliding window of all layers, or None. Layers that mix full and sliding attention are refused."""
    window = config.positive("sliding_window", 4096) if config.flag("use_sliding_window", False) else None
    kinds = config.names("layer_types")
    if not kinds:
        first = config.integer("max_window_layers", 28)
        kinds = [
            "sliding_attention" if window is not None and i >= first else "full_attention"
            for i in range(config.integer("num_hidden_layers"))
        ]
    if set(kinds) == {"full_attention"}:
        return None
    if set(kinds) == {"sliding_attention"} and window is not None:
        return window
    raise config.unsupported("use_sliding_window with layers of full and of sliding attention")


def _experts(config: _Config, *, key: str, default: int, default_picked: int) -> ExpertsConfig:
    """Read the experts of a model in which every layer has some; `key` is that of their number."""
    if config.integer("decoder_sparse_step", 1) != 1 or config.get("mlp_only_layers"):
        raise config.unsupported("experts in some layers only (decoder_sparse_step, mlp_only_layers)")
    picked = config.positive("num_experts_per_tok", default_picked)
    try:
        return ExpertsConfig(num_experts=config.positive(key, default), experts_per_token=picked)
    except ConfigError as error:
        raise ConfigError(f"{config.path}: {error}") from error


def _mixtral(config: _Config) -> dict[str, Any]:
    window = config.positive("sliding_window") if config.get("sliding_window") is not None else None
    return {
        **_rotary(config, default_heads=8, default_head_dim=None, default_max=131072),
        "sliding_window": window,
        "experts": _experts(config, key="num_local_experts", default=8, default_picked=2),
    }


def _qwen2(config: _Config) -> dict[str, Any]:
    return {
        **_rotary(config, default_heads=32, default_head_dim=None, default_max=32768),
        "qkv_bias": True,
        "sliding_window": _qwen_window(config),
    }


def _qwen3(config: _Config) -> dict[str, Any]:
    bias = config.flag("attention_bias", False)
    return {
        **_rotary(config, default_heads=32, default_head_dim=128, default_max=32768),
        "qkv_bias": bias,
        "attention_out_bias": bias,
        "qk_norm": True,
        "sliding_window": _qwen_window(config),
    }


def _qwen2_moe(config: _Config) -> dict[str, Any]:
    experts = _experts(config, key="num_experts", default=60, default_picked=4)
    return {
        **_rotary(config, default_heads=16, default_head_dim=None, default_max=32768),
        "ffn_size": config.positive("moe_intermediate_size", 1408),
        "qkv_bias": config.flag("qkv_bias", True),
        "sliding_window": _qwen_window(config),
        "experts": replace(experts, shared_ffn_size=config.positive("shared_expert_intermediate_size", 5632)),
    }


def _qwen3_moe(config: _Config) -> dict[str, Any]:
    bias = config.flag("attention_bias", False)
    return {
        **_rotary(config, default_heads=4, default_head_dim=None, default_max=32768),
        "ffn_size": config.positive("moe_intermediate_size", 768),
        "qkv_bias": bias,
        "attention_out_bias": bias,
        "qk_norm": True,
        "sliding_window": _qwen_window(config),
        "experts": _experts(config, key="num_experts", default=128, default_picked=8),
    }


def _gpt2(config: _Config) -> dict[str, Any]:
    for key in ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention"):
        if config.flag(key, False):
            raise config.unsupported(f"{key}=true")
    if not config.flag("scale_attn_weights", True):
        raise config.unsupported("scale_attn_weights=false")
    hidden, heads = config.integer("n_embd", 768), config.positive("n_head", 12)
    if hidden % heads:
        raise ConfigError(f"{config.path}: n_head={heads}: must divide n_embd={hidden}")
    return {
        "vocab_size": config.integer("vocab_size", 50257),
        "hidden_size": hidden,
        "num_layers": config.integer("n_layer", 12),
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": hidden // heads,
        "ffn_size": config.integer("n_inner", 4 * hidden),
        "max_position": config.integer("n_positions", 1024),
        "norm": "layer",
        "norm_eps": config.number("layer_norm_epsilon", 1e-5),
        "position": "learned",
        "activation": config.activation("activation_function", "gelu_new"),
        "gated_ffn": False,
        "qkv_bias": True,
        "attention_out_bias": True,
        "ffn_bias": True,
        "tie_embeddings": config.flag("tie_word_embeddings", True),
    }


_READERS: dict[str, Callable[[_Config], dict[str, Any]]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "GPT2LMHeadModel": _gpt2,
    "MixtralForCausalLM": _mixtral,
    "Qwen2MoeForCausalLM": _qwen2_moe,
    "Qwen3MoeForCausalLM": _qwen3_moe,
}
_NAME_BY_MODEL_TYPE = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
_NOT_MODELLED = {
    "DeepseekV2ForCausalLM": "multi-head latent attention",
    "DeepseekV3ForCausalLM": "multi-head latent attention",
    "GptOssForCausalLM": "layers that alternate between full and sliding attention",
}
