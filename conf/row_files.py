"""Opens files of rows (prompts, traces, conversations) and parses JSON rows.

The format is detected from the content: a CSV may be named .json, and a gzipped file may lack .gz.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from . import strict_json
from .errors import ConfigError

_FOREIGN = {  # by magic bytes: file types that hold no rows
    b"PAR1": "a Parquet file",
    b"ARROW1": "an Arrow file",
    b"PK\x03\x04": "a zip archive",
    b"\x28\xb5\x2f\xfd": "compressed by zstd",
    b"BZh": "compressed by bzip2",
    b"\xfd7zXZ": "compressed by xz",
    b"SQLite format": "an SQLite database",
    b"version https://git-lfs": "a Git LFS pointer, not the file itself",
    b"\xff\xfe": "text in UTF-16",
    b"\xfe\xff": "text in UTF-16",
}
_HEAD = max(map(len, _FOREIGN))
_BLANK = re.compile(r"\s*")


def gunzipped(file: io.BufferedReader) -> io.BufferedReader:
    """Return a file from its start, decompressed if its content is gzipped."""
    is_gzip = file.read(2) == b"\x1f\x8b"
    file.seek(0)
    return io.BufferedReader(gzip.GzipFile(fileobj=file)) if is_gzip else file


def open_rows(path: Path, key: str, pipe: str = "give a file") -> io.BufferedReader:
    """Open a regular text file, gzipped or not.

    Args:
        path: the file's path.
        key: the config key that names it, for errors.
        pipe: what the error suggests for a pipe, which can only be read once.

    Raises:
        ConfigError: the file is missing, not a regular file, or not text.
        OSError: it cannot be read.
    """
    if path.is_fifo():
        raise ConfigError(f"{key}={path}: a pipe; {pipe}")
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise ConfigError(f"{key}={path}: not a regular file; give a text file")
    try:
        file = gunzipped(path.open("rb"))
        head = file.peek(_HEAD)
    except FileNotFoundError:
        raise ConfigError(f"{key}={path}: no such file") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(f"{path}: a damaged .gz ({error})") from None
    except OSError as error:
        raise ConfigError(f"{key}={path}: {(error.strerror or 'cannot be read').lower()}") from None
    if foreign := next((what for magic, what in _FOREIGN.items() if head.startswith(magic)), None):
        raise ConfigError(f"{key}={path}: {foreign}; give UTF-8 text, gzipped or not")
    return file


def first_row(lines: Iterator[str]) -> tuple[str, int, Iterator[str]]:
    """Return the first non-blank line ("" if none), its number, and an iterator that starts with it."""
    for number, line in enumerate(lines, 1):
        if line.strip():
            return line, number, chain([line], lines)
    return "", 1, iter(())


def json_rows(lines: Iterable[str], source: str, first: int = 1) -> Iterator[tuple[int, Any]]:
    """Yield each JSON value with its line number: from JSON Lines, an array, or values that span several lines.

    The forms may be mixed. Blank lines are skipped. For errors, `source` names the file and `first` is the number of
    the first line.

    Raises:
        ConfigError: a line is not JSON, or an object has a duplicate key.
    """
    lines = iter(lines)
    for number, line in enumerate(lines, first):
        begin = line.strip()
        if begin == "{" or begin.startswith("["):
            yield from _values("\n".join(part.removesuffix("\n") for part in chain([line], lines)), source, number)
        elif begin:
            value, end = _decoded(begin, 0, source, number)
            if end < len(begin):
                raise ConfigError(f"{source}:{number}: not JSON: Extra data at column {end + 1}")
            yield number, value


def _values(text: str, source: str, line: int) -> Iterator[tuple[int, Any]]:
    """Yield the values in a text that starts at line `line`; those of an array one by one."""
    place = counted = 0
    number, inside = line, False
    while (place := _blank_until(text, place)) < len(text) or inside:
        number, counted = number + text.count("\n", counted, place), place
        if text.startswith("]" if inside else "[", place):
            inside, place = not inside, place + 1
            continue
        value, end = _decoded(text, place, source, number)
        yield number, value
        place = _blank_until(text, end)
        if inside and text.startswith(",", place):
            place += 1
        elif inside and not text.startswith("]", place):
            raise ConfigError(f"{source}:{number}: not JSON: expected , or ] after this array element")


def _blank_until(text: str, place: int) -> int:
    found = _BLANK.match(text, place)
    assert found is not None
    return found.end()


def _decoded(text: str, place: int, source: str, line: int) -> tuple[Any, int]:
    """Return the value at a position, which is on line `line`, and its end."""
    try:
        return strict_json.DECODER.raw_decode(text, place)
    except json.JSONDecodeError as error:
        line += text.count("\n", place, error.pos)
        raise ConfigError(f"{source}:{line}: not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise ConfigError(f"{source}:{line}: not JSON: nested too deeply") from None
    except ConfigError as error:
        raise ConfigError(f"{source}:{line}: {error}") from None
    except ValueError:  # Python parses integers of up to 4,300 digits
        raise ConfigError(f"{source}:{line}: not JSON: a number has too many digits") from None
