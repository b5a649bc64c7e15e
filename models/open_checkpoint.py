"""Opens the checkpoint of a model: a folder of safetensors files, or a GGUF file."""

from __future__ import annotations

from pathlib import Path

from ..conf.architecture import Architecture
from .checkpoint import Checkpoint, SafetensorsFolder
from .gguf.weights import GgufTensors


def open_checkpoint(path: Path, arch: Architecture) -> Checkpoint:
    """Open the checkpoint in a folder or a GGUF file.

    Raises:
        ConfigError: a file is missing, or is not what its name says.
    """
    return SafetensorsFolder(path) if path.is_dir() else GgufTensors(path, arch)
