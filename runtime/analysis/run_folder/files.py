"""The file names of a run folder, and its gzip files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from gzip import GzipFile
from itertools import islice
from pathlib import Path
from typing import TypeVar

from ...core.whole_file import whole_file

T = TypeVar("T")

SUMMARY = "summary.json"
RECORD = "record.jsonl.gz"
SPANS = "spans.csv.gz"
REQUESTS = "requests.csv"
STAGE_TIMES = "stage_times.json"
TRACE = "trace.json.gz"
EXPLANATION = "explain.json"
REQUIRED = (SUMMARY, RECORD, SPANS)  # a folder that has them is a run folder

REPLICAS_KEY = "replicas"  # key in a fleet's summary: the number of replica run folders
PREFILL_KEY = "prefill_replicas"  # key in a fleet's summary: how many of them, the first ones, are a prefill pool


@contextmanager
def gzip_file(path: Path) -> Iterator[GzipFile]:
    """Write a gzip file atomically. Higher compression levels take twice as long, and save little.

    Raises:
        OSError: as for `whole_file`.
    """
    with (
        whole_file(path) as part,
        part.open("wb") as raw,
        GzipFile(path.name, "wb", compresslevel=2, fileobj=raw, mtime=0) as file,
    ):
        yield file


def replica_folder(number: int) -> str:
    """Return the name of a replica's run folder inside its fleet's."""
    return f"replica_{number}"


def batches(items: Iterator[T], size: int) -> Iterator[list[T]]:
    """Yield the items in lists of `size`; the last may be shorter."""
    while batch := list(islice(items, size)):
        yield batch
