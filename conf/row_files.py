"""Opens a user's file of rows (prompts, a trace, conversations), and reads its JSON. Its content says what it is.

A name says little: a CSV may be called .json, and a gzipped file may lack its .gz.
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

_FOREIGN = {  # by its first bytes: what a file of no rows is
    b"PAR1": "a Parquet file",
    b"ARROW1": "an Arrow file",
    b"PK\x03\x04": "a zip archive",
    b"\x28\xb5\x2f\xfd": "compressed by zstd",
    b"BZh": "compressed by bzip2",
    b"\xfd7zXZ": "compressed by xz",
    b"SQLite format": "an SQLite database",
    b"version https://git-lfs": "a pointer of Git LFS, without the file",
    b"\xff\xfe": "text in UTF-16",
    b"\xfe\xff": "text in UTF-16",
}
_HEAD = max(map(len, _FOREIGN))
_BLANK = re.compile(r"\s*")


def gunzipped(file: io.BufferedReader) -> io.BufferedReader:
    """Return a file from its begin, decompressed where its content is gzipped, whatever its name says."""
    is_gzip = file.read(2) == b"\x1f\x8b"
    file.seek(0)
    return io.BufferedReader(gzip.GzipFile(fileobj=file)) if is_gzip else file


def open_rows(path: Path, key: str, pipe: str = "give a file") -> io.BufferedReader:
    """Open a regular file of text in UTF-8, or one that is gzipped.

    An error names the file by the config's `key`. For a pipe, which can be read once only, it says `pipe`.

    Raises:
        ConfigError: it is missing, no file, or none of text.
        OSError: it cannot be read.
    """
    if path.is_fifo():
        raise ConfigError(f"{key}={path}: a pipe; {pipe}")
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise ConfigError(f"{key}={path}: not a regular file; give a file of text")
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
        raise ConfigError(f"{key}={path}: {foreign}; give text in UTF-8, gzipped or not")
    return file


def first_row(lines: Iterator[str]) -> tuple[str, int, Iterator[str]]:
    """Return the first line that is not blank ("" if there is none), its number, and the lines from it on."""
    for number, line in enumerate(lines, 1):
        if line.strip():
            return line, number, chain([line], lines)
    return "", 1, iter(())


def json_rows(lines: Iterable[str], source: str, first: int = 1) -> Iterator[tuple[int, Any]]:
    """Yield each JSON value with the number of its line: of JSON Lines, of an array, or of values over several lines.

    The lines need not be of one of these forms only. Blank ones are skipped.

    For errors, `source` names the file, and `first` is the number of the first line.

    Raises:
        ConfigError: a line is not JSON, or an object has a key twice.
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
    """Yield the values of a text whose first line has the number `line`, and those of an array one by one."""
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
            raise ConfigError(f"{source}:{number}: not JSON: the array does not go on after this entry")


def _blank_until(text: str, place: int) -> int:
    found = _BLANK.match(text, place)
    assert found is not None
    return found.end()


def _decoded(text: str, place: int, source: str, line: int) -> tuple[Any, int]:
    """Return the value at a place, which is on the line of that number, and where it ends."""
    try:
        return strict_json.DECODER.raw_decode(text, place)
    except json.JSONDecodeError as error:
        line += text.count("\n", place, error.pos)
        raise ConfigError(f"{source}:{line}: not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise ConfigError(f"{source}:{line}: not JSON: nested too deep") from None
    except ConfigError as error:
        raise ConfigError(f"{source}:{line}: {error}") from None
    except ValueError:  # Python reads no integer of more than 4,300 digits
        raise ConfigError(f"{source}:{line}: not JSON: a number has too many digits") from None
