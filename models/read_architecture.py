"""Reads a model's architecture from its config.json, or a GGUF file's header. Imports no torch.

Unsupported features raise an error that names them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..conf.architecture import Architecture
from ..conf.errors import ConfigError
from .families import NAME_BY_MODEL_TYPE, NOT_MODELLED, READERS, TEXT_MODELS
from .families.common import HARMLESS
from .model_config import ModelValues
from .quantization.config import read_quantization
from .safetensors_folder import SafetensorsFolder

_WEIGHTS = ("weight", "qweight", "weight_packed")  # what a linear layer's weight may be called
_OTHER_INPUT = (  # keys of image encoders and image tokens
    *("text_config", "vision_config", "mm_tokens_per_image", "vision_token_id", "projector_hidden_act"),
    *(f"{of}_token_{kind}" for of in ("boi", "eoi", "image") for kind in ("index", "id")),
)
_DTYPES = ("float32", "bfloat16", "float16", "float64", "float", "half", "auto")  # of the weights; any is accepted


def read_architecture(path: Path, config: ModelValues, *, tensors: bool) -> Architecture:
    """Read the architecture of a folder or of a GGUF file.

    Args:
        path: from `find_weights`.
        config: its config.json, or what its header says in config.json's keys.
        tensors: there are tensors, which say whether the LM head is tied to the embedding.

    Raises:
        ConfigError: the architecture is unknown, or has a feature that is not supported.
    """
    is_gguf = path.is_file()
    if config.names("architectures")[:1] and config.names("architectures")[0] in TEXT_MODELS:
        config = _text_model(config)
    name = _family(config)
    if not is_gguf:
        read_quantization(config)  # raises if it is unsupported
    family, read = READERS[name]
    try:
        arch = read(config)
    except ConfigError as error:
        if str(error).startswith(f"{config.path}: "):
            raise
        raise ConfigError(f"{config.path}: {error}") from error  # from a check of `Architecture`
    bos, eos = config.token("bos_token_id"), _eos_ids(config, path, arch.vocab_size)
    for key in ("torch_dtype", "dtype"):
        if str(config.get(key, "auto")).removeprefix("torch.") not in _DTYPES:
            raise config.wrong(key, f"one of {', '.join(_DTYPES)}")
    tied = arch.tie_embeddings
    if not is_gguf:
        config.refuse_others(HARMLESS)
        if tensors and tied:
            folder = SafetensorsFolder(path)
            tied = not any(folder.has(f"lm_head.{part}") for part in _WEIGHTS)
    named = arch.family if arch.family in family.variants else family.name
    return replace(arch, family=named, bos_token_id=bos, eos_token_ids=eos, tie_embeddings=tied)


def _text_model(config: ModelValues) -> ModelValues:
    """Return the config of a multimodal model's text model, in the form of a text-only model's config.

    Raises:
        ConfigError: the `model_type` of `text_config` is not the expected one, or `text_config` is empty.
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
    """Return the reader's name: the first of `architectures`, else by `model_type`. Both must agree."""
    named, kind = config.names("architectures"), config.get("model_type")
    by_kind = NAME_BY_MODEL_TYPE.get(str(kind))
    name = named[0] if named else by_kind
    if name in NOT_MODELLED:
        raise config.unsupported(f"architectures={named} ({NOT_MODELLED[name]})")
    if name is None or name not in READERS:
        found = f"architectures={named}" if named else f"model_type={kind!r}"
        raise ConfigError(f"{config.path}: {found} is not supported; supported: {', '.join(READERS)}")
    if kind is not None and by_kind != name:
        raise ConfigError(f"{config.path}: model_type={kind!r}: contradicts architectures ({name})")
    return name


def _eos_ids(config: ModelValues, folder: Path, vocab_size: int) -> tuple[int, ...]:
    """Return the end-of-sequence ids from generation_config.json if it has any, else from config.json.

    If neither has any, `runtime/engine/plan.py` uses the ones from the tokenizer's files.
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
