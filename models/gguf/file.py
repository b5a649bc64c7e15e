"""Reads a GGUF header: the fields, and the tensors' locations. Imports no torch.

Source of the layout: docs/gguf.md of the ggml project. With a vocabulary of 49,152 tokens, the package `gguf` takes
2.1 s, this module 0.1 s; each rank reads the header.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

from ...conf.errors import ConfigError, reason
from ..json_file import refuse_pointer

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A tensor's location: its shape in torch's order, GGML type number, byte offset and file."""

    shape: tuple[int, ...]
    type: int
    offset: int
    path: Path


def open_gguf(path: Path) -> GgufFile:
    """Open a GGUF file, or a split model by the path of any of its parts.

    Headers are cached until the files change.

    Raises:
        ConfigError: a file cannot be read, is no GGUF file of version 2 or 3, or is missing or not a part of the model.
    """
    paths, states = split_paths(path), []
    for each in paths:
        try:
            states.append(each.stat())
        except OSError:
            if each != path:
                raise ConfigError(f"{each}: missing; {path.name} is one of {len(paths)} parts of a model") from None
            return GgufFile(path)  # raises the error
        refuse_pointer(each)
    return _opened(paths, tuple((state.st_mtime_ns, state.st_size) for state in states))


def split_paths(path: Path) -> tuple[Path, ...]:
    """Return all parts of a split model, given any of them; the file itself if it is not split."""
    if (found := _PART.fullmatch(path.name)) is None:
        return (path,)
    name, _, count = found.groups()
    return tuple(path.with_name(f"{name}-{i + 1:05d}-of-{count}.gguf") for i in range(int(count))) or (path,)


@lru_cache(maxsize=2)
def _opened(paths: tuple[Path, ...], states: tuple[tuple[int, int], ...]) -> GgufFile:
    first, *others = parts = [GgufFile(path) for path in paths]
    for i, part in enumerate(parts):
        number, count = part.get("split.no", 0), part.get("split.count", 1)
        if count != len(parts) or number != i:
            of = f"part {i + 1} of {len(parts)} by its name, as in NAME-00001-of-00003.gguf"
            raise ConfigError(f"{part.path}: split.no={number} and split.count={count}, but {of}")
    for part in others:
        for name, place in part.tensors.items():
            if first.tensors.setdefault(name, place) is not place:
                raise ConfigError(f"{part.path}: tensor {name} is in {first.tensors[name].path.name} too")
    if (total := first.get("split.tensors.count", len(first.tensors))) != len(first.tensors):
        raise ConfigError(f"{first.path}: split.tensors.count={total}, but its parts hold {len(first.tensors)} tensors")
    return first


class GgufFile:
    """The fields and tensors of a GGUF file, by name. For a split model: the first file, with all parts' tensors.

    Raises:
        ConfigError: the file cannot be read, or is no GGUF file of version 2 or 3.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fields: dict[str, Any] = {}
        self.tensors: dict[str, TensorPlace] = {}
        try:
            with path.open("rb") as file:
                self._read(_Header(file, path))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: not a readable GGUF file ({reason(error)})") from error

    def _read(self, header: _Header) -> None:
        if (magic := header.take(4)) != _MAGIC:
            raise ValueError(f"it begins with {magic!r}")
        if (version := header.number("I")) not in _VERSIONS:
            if int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS:
                raise ValueError("big-endian; convert it: python -m gguf.scripts.gguf_convert_endian FILE little")
            raise ValueError(f"version {version}; must be 2 or 3")
        num_tensors, num_fields = header.number("Q"), header.number("Q")
        for _ in range(num_fields):
            name = header.string()
            self.fields[name] = header.value(header.number("I"))
        places = [(header.string(), header.place()) for _ in range(num_tensors)]
        alignment = self.fields.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1:
            raise ValueError(f"general.alignment={alignment!r}")
        first = -(-header.position // alignment) * alignment
        self.tensors = {name: replace(place, offset=first + place.offset) for name, place in places}

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a field, or `default` if the file does not have it."""
        return self.fields.get(name, default)


class _Header:
    """A cursor over the header. Reading beyond the end of the file raises `ValueError`."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file = file
        self._path = path
        self._left = path.stat().st_size
        self.position = 0

    def take(self, count: int) -> bytes:
        if count > self._left:
            raise ValueError("it ends within its header")
        self._left -= count
        self.position += count
        return self._file.read(count)

    def number(self, kind: str) -> Any:
        return struct.unpack("<" + kind, self.take(struct.calcsize("<" + kind)))[0]

    def string(self) -> str:
        return self.take(self.number("Q")).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise ValueError(f"a field has type {kind}")
        of, count = self.number("I"), self.number("Q")
        if count > self._left:
            raise ValueError("it ends within its header")
        if of in _NUMBERS:
            letter = _NUMBERS[of]
            data = self.take(count * struct.calcsize("<" + letter))
            return list(struct.unpack(f"<{count}{letter}", data))
        read: Callable[[], Any] = self.string if of == _STRING else lambda: self.value(of)
        return [read() for _ in range(count)]

    def place(self) -> TensorPlace:
        num_dimensions = self.number("I")
        if not 1 <= num_dimensions <= _MOST_DIMENSIONS:
            raise ValueError(f"a tensor has {num_dimensions} dimensions")
        shape = tuple(self.number("Q") for _ in range(num_dimensions))[::-1]
        if math.prod(shape) < 1:
            raise ValueError(f"a tensor has shape {list(shape)}")
        return TensorPlace(shape, self.number("I"), self.number("Q"), self._path)
