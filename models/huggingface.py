"""Finds a model's Hugging Face folder or GGUF file and reads the architecture from it. Imports no torch.

A feature that this package does not compute exactly is refused by name.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..conf.architecture import Architecture
from ..conf.errors import ConfigError
from ..conf.schema import NAMED_WEIGHTS, ModelConfig, is_hub_name
from ..conf.user_path import user_path
from .checkpoint import SafetensorsFolder
from .families import NAME_BY_MODEL_TYPE, NOT_MODELLED, READERS, TEXT_MODELS
from .families.common import HARMLESS
from .gguf.config import config_values
from .gguf.file import open_gguf, split_paths
from .gguf.smollm2 import smollm2
from .hub import TEXTS, of_cache_folder, snapshot
from .json_file import refuse_pointer
from .model_config import ModelValues
from .quantization.config import read_quantization

_SIZE_FIELDS = ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "ffn_size")
_NAMED = ", ".join(NAMED_WEIGHTS[:-1]) + f" or {NAMED_WEIGHTS[-1]}"
_WEIGHTS = ("weight", "qweight", "weight_packed")  # what a linear layer's weight may be called
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_FOREIGN = (".h5", ".msgpack", ".onnx", ".ot", ".npz")  # weights of TensorFlow, Flax, ONNX, rust-bert and JAX
_SHORT = ("bfloat16", "float16", "half")
_LONG_GGUF = (0, 28)  # F32 and F64
_OTHER_INPUT = (  # keys of what reads images, and where its output stands among the tokens
    *("text_config", "vision_config", "mm_tokens_per_image", "vision_token_id", "projector_hidden_act"),
    *(f"{of}_token_{kind}" for of in ("boi", "eoi", "image") for kind in ("index", "id")),
)
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
    path = user_path(model.weights, "model.weights")
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
    if adapters := sorted(path.glob("adapter_*")):
        raise ConfigError(f"{key}: holds {adapters[0].name}, of a LoRA adapter; merge it into its base model first")
    if not (path / "config.json").is_file():
        if (path / "config.json").is_symlink():
            refuse_pointer(path / "config.json")
        raise ConfigError(f"{key}: no config.json in this folder; must be a Hugging Face folder{_hint(path)}")
    for file in sorted(file for pattern in TEXTS if tensors for file in path.glob(pattern)):
        refuse_pointer(file)
    if tensors and not has_tensors:
        pickles, foreign = (
            sorted(p.name for p in path.iterdir() if p.suffix in kinds) for kinds in (_PICKLES, _FOREIGN)
        )
        if pickles:
            raise ConfigError(f"{key}: only pickle files ({pickles[0]}), which may run code; convert to safetensors")
        if foreign:
            raise ConfigError(f"{key}: no safetensors file in this folder, but {foreign[0]}; convert it to safetensors")
        raise ConfigError(f"{key}: no safetensors file in this folder{_hint(path)}")
    return path


def _hint(folder: Path) -> str:
    """Return what a folder without a model in Hugging Face's layout seems to be: the end of an error."""
    if (folder / "params.json").is_file():
        return "; this is Mistral's or Meta's own layout (params.json)"
    inner = [each.parent for each in sorted(folder.glob("*/config.json"))]
    return f"; one is {inner[-1]}" if inner else ""


def _only_gguf(folder: Path, key: str) -> Path | None:
    """Return the folder's one GGUF file, or a part of its one split model; None where it has none."""
    files = sorted(file for file in folder.glob("*.gguf") if not file.name.startswith("mmproj"))  # a vision encoder
    models = {split_paths(file): file.name for file in reversed(files)}
    if len(models) > 1:
        raise ConfigError(f"{key}: several GGUF files; give one of {', '.join(reversed(models.values()))}")
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
        arch = _read_architecture(folder, tensors=tensors)
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


def has_short_weights(model: ModelConfig) -> bool:
    """Return whether the checkpoint says that it has weights of 16 bits or fewer; random weights have 32.

    Raises:
        ConfigError: as `resolve_weights`, or a file is no JSON or GGUF file.
    """
    path = resolve_weights(model, tensors=False)
    if path is None:
        return False
    if path.is_file():
        return any(place.type not in _LONG_GGUF for place in open_gguf(path).tensors.values() if len(place.shape) > 1)
    config = ModelValues.read(path / "config.json")
    if read_quantization(config) is not None:
        return True
    return str(config.get("dtype", config.get("torch_dtype"))).removeprefix("torch.") in _SHORT


def _read_architecture(path: Path, *, tensors: bool) -> Architecture:
    """Read the architecture of a folder or of a GGUF file."""
    is_gguf = path.is_file()
    config = ModelValues(path, config_values(open_gguf(path))) if is_gguf else ModelValues.read(path / "config.json")
    if config.names("architectures")[:1] and config.names("architectures")[0] in TEXT_MODELS:
        config = _text_model(config)
    name = _family(config)
    if not is_gguf:
        read_quantization(config)  # which refuses what is not supported
    family, read = READERS[name]
    fields = {"family": family.name, **read(config), "bos_token_id": config.token("bos_token_id")}
    fields["eos_token_ids"] = _eos_ids(config, path, fields["vocab_size"])
    for key in ("torch_dtype", "dtype"):
        if str(config.get(key, "auto")).removeprefix("torch.") not in _DTYPES:
            raise config.wrong(key, f"one of {', '.join(_DTYPES)}")
    if not is_gguf:
        config.refuse_others(HARMLESS)
    if not is_gguf and tensors and fields["tie_embeddings"]:
        folder = SafetensorsFolder(path)
        fields["tie_embeddings"] = not any(folder.has(f"lm_head.{part}") for part in _WEIGHTS)
    try:
        return Architecture(**fields)
    except ConfigError as error:
        raise ConfigError(f"{config.path}: {error}") from error


def _text_model(config: ModelValues) -> ModelValues:
    """Return the values of the text model of one that takes other input too, as of a model of text alone.

    Raises:
        ConfigError: a key beside `text_config` is unknown, so it may change what is computed.
    """
    name = config.names("architectures")[0]
    kind, text = TEXT_MODELS[name], config.part("text_config")
    if text.get("model_type", kind) != kind or not text.values:
        raise text.wrong("model_type", kind)
    beside = {key: value for key, value in config.values.items() if key not in _OTHER_INPUT}
    inside = {key: value for key, value in text.values.items() if key != "architectures"}
    both = beside | inside | {"architectures": [NAME_BY_MODEL_TYPE[kind]], "model_type": kind}
    for key in ("eos_token_id", "bos_token_id", "pad_token_id", "tie_word_embeddings"):
        both[key] = beside[key] if key in beside else inside.get(key)
        if both[key] is None:
            del both[key]
    return ModelValues(config.path, both)


def _family(config: ModelValues) -> str:
    """Return the name of the reader: that of `architectures`, which `model_type` must not contradict."""
    named, kind = config.names("architectures"), config.get("model_type")
    by_kind = NAME_BY_MODEL_TYPE.get(str(kind))
    name = named[0] if named else by_kind
    if name in NOT_MODELLED:
        raise config.unsupported(f"architectures={named} ({NOT_MODELLED[name]})")
    if name is None or name not in READERS:
        found = f"architectures={named}" if named else f"model_type={kind!r}"
        raise ConfigError(f"{config.path}: {found} is not supported; supported: {', '.join(READERS)}")
    if kind is not None and by_kind != name:
        raise ConfigError(f"{config.path}: model_type={kind!r}: contradicts architectures, which says {name}")
    return name


def _eos_ids(config: ModelValues, folder: Path, vocab_size: int) -> tuple[int, ...]:
    """Return the end-of-sequence ids: of generation_config.json if it has any, else of config.json.

    Where neither has any, `runtime/engine/plan.py` takes those that the tokenizer's files name.
    """
    source, file = config, folder / "generation_config.json"
    if file.is_file() and (generation := ModelValues.read(file)).tokens("eos_token_id"):
        config.tokens("eos_token_id")
        source = generation
    ids = tuple(dict.fromkeys(source.tokens("eos_token_id")))
    for token in ids:
        if not 0 <= token < vocab_size:
            most = vocab_size - 1
            raise ConfigError(f"{source.path}: eos_token_id={token}: must lie in 0 .. {most}, the vocabulary")
    return ids
