"""Files that are written whole or not at all."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def whole_file(path: Path, needed: int | None = None) -> Iterator[Path]:
    """Write `path` atomically: yield a temporary path in the same folder, and rename it when the block succeeds.

    Temporary files left by killed processes are removed.

    Raises:
        OSError: it cannot be written. The error names the file, and the bytes `needed` if given. The temporary file is
            removed, and an existing file is unchanged.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
        if (pid := left.suffixes[-2][1:]).isdigit() and not _lives(int(pid)):  # killed while it wrote
            with suppress(OSError):
                left.unlink()
    try:
        yield part
        part.replace(path)
    except BaseException as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None and error.filename in (None, str(part)):
            size = "" if needed is None else f" ({needed:,} bytes needed)"
            raise OSError(error.errno, f"{error.strerror}{size}", str(path)) from error
        raise


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically.

    Raises:
        OSError: as for `whole_file`.
    """
    data = text.encode()
    with whole_file(path, len(data)) as part:
        part.write_bytes(data)
