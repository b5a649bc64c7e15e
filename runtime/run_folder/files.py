"""The files of a run folder: their names, and how those that are compressed are written."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from gzip import GzipFile
from itertools import islice
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

SUMMARY = "summary.json"
RECORD = "record.jsonl.gz"
SPANS = "spans.csv.gz"
REQUESTS = "requests.csv"
STAGE_TIMES = "stage_times.json"
TRACE = "trace.json.gz"
EXPLANATION = "explain.json"
REQUIRED = (SUMMARY, RECORD, SPANS)  # a folder that has them is a run folder

REPLICAS_KEY = "replicas"  # of a fleet's summary: how many run folders lie inside it
PREFILL_KEY = "prefill_replicas"  # the same: how many of them, the first ones, are a prefill pool


@contextmanager
def whole_file(path: Path, needed: int | None = None) -> Iterator[Path]:
    """Yield the path of a part beside `path`, which takes the place of `path` when all of it is written.

    Parts of `path` that killed processes have left are removed.

    Raises:
        OSError: it cannot be written. The error names the file, and the bytes `needed` if they are given. No part is
            left, and an older file is still there.
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


@contextmanager
def gzip_file(path: Path) -> Iterator[GzipFile]:
    """Write a gzip file, whole or not at all. Higher levels of compression take twice as long, and save little.

    Raises:
        OSError: as of `whole_file`.
    """
    with (
        whole_file(path) as part,
        part.open("wb") as raw,
        GzipFile(path.name, "wb", compresslevel=2, fileobj=raw, mtime=0) as file,
    ):
        yield file


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all.

    Raises:
        OSError: as of `whole_file`.
    """
    data = text.encode()
    with whole_file(path, len(data)) as part:
        part.write_bytes(data)


def replica_folder(number: int) -> str:
    """Return the name of a replica's run folder inside its fleet's."""
    return f"replica_{number}"


def batches(items: Iterator[T], size: int) -> Iterator[list[T]]:
    """Yield the items in lists of `size`, to be written at once; the last may be shorter."""
    while batch := list(islice(items, size)):
        yield batch
