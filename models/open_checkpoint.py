"""Opens the checkpoint of a model: a folder of safetensors files, or a GGUF file."""

from __future__ import annotations

from pathlib import Path

from ..conf.schema import Architecture
from .checkpoint import Checkpoint, SafetensorsFolder
from .gguf.weights import GgufTensors
from .model_config import ModelValues
from .quantization.config import read_quantization
from .quantization.folder import QuantizedFolder


def open_checkpoint(path: Path, arch: Architecture) -> Checkpoint:
    """Open the checkpoint in a folder or a GGUF file.

    Raises:
        ConfigError: a file is missing, or is not what its name says, or its weights are quantized in an unknown way.
    """
    if not path.is_dir():
        return GgufTensors(path, arch)
    scheme_of = read_quantization(ModelValues.read(path / "config.json"))
    return SafetensorsFolder(path) if scheme_of is None else QuantizedFolder(path, arch, scheme_of)
