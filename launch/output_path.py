"""Checks that what a run will write can be written, before the run starts."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from ..conf.errors import ConfigError


def check_writable(path: Path, key: str) -> None:
    """Check that the file that a key names can be written. A new file is not left behind.

    Raises:
        ConfigError: it cannot, naming the key.
    """
    is_new = not os.path.lexists(path)
    try:
        path.open("ab").close()
        if is_new:
            path.unlink()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}={path}: {_reason(error)}; give a file that can be written") from None


def check_folder(path: Path, key: str) -> None:
    """Check that the folder that a key names is there or can be made, and takes files.

    Raises:
        ConfigError: a file stands in its way or it cannot be written, naming the key.
    """
    try:
        nearest = next(each for each in (path, *path.absolute().parents) if os.path.lexists(each))
        if not nearest.is_dir():
            raise ConfigError(f"{key}={path}: {nearest} is a file; give a folder")
        tempfile.TemporaryFile(dir=nearest).close()
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{key}={path}: {_reason(error)}; give a folder that can be written") from None


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) and error.strerror else str(error)).lower()
