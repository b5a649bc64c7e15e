"""The files of a run folder: their names, and how those that are compressed are written."""

from __future__ import annotations

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


def gzip_file(path: Path) -> GzipFile:
    """Open a gzip file to write. Higher levels of compression take twice as long, and files hardly shrink."""
    return GzipFile(path, "wb", compresslevel=2, mtime=0)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Give an `OSError` without a file name, as that of a write to a full disk, the name of `path`."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all.

    Raises:
        OSError: it cannot be written; the error names the file and the bytes needed. An older file is still there.
    """
    data, part = text.encode(), path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(data)
        part.replace(path)
    except OSError as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise OSError(error.errno, f"{error.strerror} ({len(data):,} bytes needed)", str(path)) from error


def replica_folder(number: int) -> str:
    """Return the name of a replica's run folder inside its fleet's."""
    return f"replica_{number}"


def batches(items: Iterator[T], size: int) -> Iterator[list[T]]:
    """Yield the items in lists of `size`, to be written at once; the last may be shorter."""
    while batch := list(islice(items, size)):
        yield batch
