"""Checks that what a run will write can be written, before the run starts."""

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
    """Open the file of a run's outputs, unbuffered. Return whether it was open before; any other file is emptied.

    Raises:
        OSError: it cannot be opened.
    """
    descriptor = _open_descriptor(path)
    if descriptor is None:
        return path.open("wb", buffering=0), False
    return os.fdopen(os.dup(descriptor), "wb", buffering=0), True


def is_open(path: Path) -> bool:
    """Return whether a file is open already: as standard output or error, or as the descriptor that it names."""
    return _open_descriptor(path) is not None


def _open_descriptor(path: Path) -> int | None:
    """Return our descriptor of a file. Opened anew, it would lose what it holds and what is written otherwise."""
    named = _DESCRIPTOR.fullmatch(str(path))
    descriptors: list[int] = [int(named[1])] if named else []
    for descriptor in [*descriptors, 1, 2]:
        with suppress(OSError):
            if os.path.samestat(path.stat(), os.fstat(descriptor)):
                return descriptor
    return None


def check_writable(path: Path, key: str) -> None:
    """Check that the file that a key names can be written. A new file is not left behind.

    A pipe is not opened: its reader would take the end of this check for the end of all.

    Raises:
        ConfigError: it cannot, naming the key.
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
        raise ConfigError(f"{key}={path}: {reason(error)}; give a file that can be written") from None


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
        raise ConfigError(f"{key}={path}: {reason(error)}; give a folder that can be written") from None


def new_folder(beside: Path, name: str) -> Path:
    """Return a folder of that name, or with a number behind it, that is not there yet beside another."""
    names = (name if number == 1 else f"{name}_{number}" for number in itertools.count(1))
    return next(path for path in (beside.absolute().parent / each for each in names) if not path.exists())
