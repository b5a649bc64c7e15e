"""Checks before a run that its outputs can be written."""

from __future__ import annotations

import errno
import itertools
import os
import re
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from ..conf.errors import ConfigError, reason

_DESCRIPTOR = re.compile(r"/(?:dev|proc/self)/fd/(\d+)")


def open_output(path: Path) -> tuple[BinaryIO, bool]:
    """Open the outputs file, unbuffered. Return it, and whether it was already open; otherwise it is truncated.

    Raises:
        OSError: it cannot be opened.
    """
    descriptor = _open_descriptor(path)
    if descriptor is None:
        return path.open("wb", buffering=0), False
    return os.fdopen(os.dup(descriptor), "wb", buffering=0), True


def is_open(path: Path) -> bool:
    """Return whether a file is already open: as standard output or error, or as a descriptor path."""
    return _open_descriptor(path) is not None


def _open_descriptor(path: Path) -> int | None:
    """Return our descriptor of a file, if open. Reopening would truncate it and overwrite other output."""
    named = _DESCRIPTOR.fullmatch(str(path))
    descriptors: list[int] = [int(named[1])] if named else []
    for descriptor in [*descriptors, 1, 2]:
        with suppress(OSError):
            if os.path.samestat(path.stat(), os.fstat(descriptor)):
                return descriptor
    return None


def check_writable(path: Path, key: str) -> None:
    """Check that the file of a key can be written. A newly created file is removed.

    A pipe is not opened, as its reader would see end-of-file afterwards.

    Raises:
        ConfigError: it cannot be written; the message names the key.
    """
    is_new = not os.path.lexists(path)
    try:
        if path.exists() and not path.is_file():
            if not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return
        path.open("ab").close()
        if is_new:
            path.unlink()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}={path}: {reason(error)}; give a writable file") from None


def check_folder(path: Path, key: str) -> None:
    """Check that the folder of a key exists or can be created, and is writable.

    Raises:
        ConfigError: it is a file or not writable; the message names the key.
    """
    try:
        nearest = next(each for each in (path, *path.absolute().parents) if os.path.lexists(each))
        if not nearest.is_dir():
            raise ConfigError(f"{key}={path}: {nearest} is a file; give a folder")
        tempfile.TemporaryFile(dir=nearest).close()
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{key}={path}: {reason(error)}; give a writable folder") from None


def new_folder(beside: Path, name: str) -> Path:
    """Return a new folder path next to another one, with a number appended if the name is taken."""
    names = (name if number == 1 else f"{name}_{number}" for number in itertools.count(1))
    return next(path for path in (beside.absolute().parent / each for each in names) if not path.exists())
