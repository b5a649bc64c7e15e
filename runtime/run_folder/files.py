"""The files of a run folder: their names, and how those that are compressed are written."""

from __future__ import annotations

from collections.abc import Iterator
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


def replica_folder(number: int) -> str:
    """Return the name of a replica's run folder inside its fleet's."""
    return f"replica_{number}"


def batches(items: Iterator[T], size: int) -> Iterator[list[T]]:
    """Yield the items in lists of `size`, to be written at once; the last may be shorter."""
    while batch := list(islice(items, size)):
        yield batch
