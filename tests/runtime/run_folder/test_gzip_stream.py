"""A gzip file that is compressed beside: whole, in order, and closed whatever happens."""

from __future__ import annotations

import gzip
import random
import threading
from pathlib import Path

import pytest

from gapless.runtime.run_folder.gzip_stream import GzipStream


def test_it_holds_what_was_written_in_order(tmp_path: Path):
    parts = [f"line {i} of many\n".encode() * (i % 5 * 20_000) for i in range(40)]
    with GzipStream(tmp_path / "a.gz") as stream:
        for part in parts:
            stream.write(part)
    assert gzip.decompress((tmp_path / "a.gz").read_bytes()) == b"".join(parts)
    with GzipStream(tmp_path / "empty.gz"):
        pass
    assert gzip.decompress((tmp_path / "empty.gz").read_bytes()) == b""


def test_a_file_that_cannot_be_written(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        GzipStream(tmp_path / "no folder" / "a.gz")

    def fill(path: Path) -> None:
        with GzipStream(path) as stream:
            for _ in range(50):
                stream.write(random.randbytes(1_000_000))

    if Path("/dev/full").exists():
        with pytest.raises(OSError, match="No space"):
            fill(Path("/dev/full"))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("gzip")]


def test_an_error_of_the_writer_s_own_leaves_no_thread(tmp_path: Path):
    def fail() -> None:
        with GzipStream(tmp_path / "a.gz") as stream:
            stream.write(b"some")
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        fail()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("gzip")]
