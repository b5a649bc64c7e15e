"""Reads a checkpoint's JSON files and detects Git LFS pointers in place of files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..conf import strict_json
from ..conf.errors import ConfigError, reason

_POINTER = b"version https://git-lfs.github.com/spec/"  # https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md


def refuse_pointer(path: Path) -> None:
    """Check that a file is not a Git LFS pointer.

    Raises:
        ConfigError: it is a Git LFS pointer, or cannot be read.
    """
    try:
        with path.open("rb") as file:
            begins = file.read(len(_POINTER))
    except OSError as error:
        target = f"a link to {path.readlink()}: " if path.is_symlink() else ""
        raise ConfigError(f"{path}: {target}{(error.strerror or 'not readable').lower()}") from error
    if begins == _POINTER:
        raise ConfigError(f"{path}: a Git LFS pointer in place of the file; run git lfs pull in its folder")


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        ConfigError: the file cannot be read, is a Git LFS pointer, or is not a JSON object.
    """
    refuse_pointer(path)
    try:
        values = strict_json.loads(path.read_text(encoding="utf-8-sig"))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not readable as JSON ({reason(error)})") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: must hold a JSON object")
    return values


def read_if_there(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, like `read_object`; empty if there is no file."""
    return read_object(path) if path.is_file() else {}
