"""Finds a model's Hugging Face folder or GGUF file. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from ..conf.errors import ConfigError
from ..conf.schema import NAMED_WEIGHTS, ModelConfig, is_hub_name
from ..conf.user_path import user_path
from .gguf.file import split_paths
from .gguf.smollm2 import smollm2
from .hub import TEXTS, of_cache_folder, snapshot
from .json_file import refuse_pointer

_NAMED = ", ".join(NAMED_WEIGHTS[:-1]) + f" or {NAMED_WEIGHTS[-1]}"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_FOREIGN = (".h5", ".msgpack", ".onnx", ".ot", ".npz")  # weights of TensorFlow, Flax, ONNX, rust-bert and JAX


def find_weights(model: ModelConfig, *, tensors: bool = True) -> Path | None:
    """Return the folder or GGUF file with the weights; None for random weights.

    Args:
        model: names the folder or file, or random weights.
        tensors: require tensors too; a simulation needs only the folder's config.json.

    Raises:
        ConfigError: the folder or file is missing, or lacks what loading needs.
    """
    if model.weights == "random":
        return None
    if model.weights == "shipped":
        folder = Path(__file__).parent / "shipped"
        if not (folder / "config.json").is_file():
            raise ConfigError(f"model.weights=shipped: this installation has no model in {folder}")
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
        raise ConfigError(f"{key}: a file; must be the folder with config.json and the safetensors files")
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
    """Return a hint for the end of an error about a folder that is not in Hugging Face's layout."""
    if (folder / "params.json").is_file():
        return "; this is Mistral's or Meta's own layout (params.json)"
    inner = [each.parent for each in sorted(folder.glob("*/config.json"))]
    return f"; one is {inner[-1]}" if inner else ""


def _only_gguf(folder: Path, key: str) -> Path | None:
    """Return the folder's only GGUF file, or a part of its only split model; None if there is none."""
    files = sorted(file for file in folder.glob("*.gguf") if not file.name.startswith("mmproj"))  # a vision encoder
    models = {split_paths(file): file.name for file in reversed(files)}
    if len(models) > 1:
        raise ConfigError(f"{key}: several GGUF files; give one of {', '.join(reversed(models.values()))}")
    return files[0] if files else None
