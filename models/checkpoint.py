"""Where weights come from: tensors of a safetensors folder read slice by slice, or made from a seed."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from ..conf.errors import ConfigError

_PREFIXES = ("model.", "transformer.")
_REOPEN_BYTES = 16 << 20  # pages of a mapped file count as this process's memory until it is closed
_BLOCK_ELEMENTS = 1 << 20
_STD = 0.02
_DTYPES = ("F64", "F32", "BF16", "F16")  # what is smaller is quantized, and its scales lie elsewhere


class TensorSource(Protocol):
    """Whole tensors by name, of which a rank reads what it holds. Slices are [first, last)."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Of the whole tensor; None where there is none of this name."""
        ...

    def read(self, name: str, rows: slice, columns: slice | None) -> torch.Tensor:
        """On the CPU, in the source's own type; `columns` is None for a vector."""
        ...

    def where(self, name: str) -> str:
        """The file of a tensor, for an error's text."""
        ...


class SafetensorsFolder:
    """The tensors of a Hugging Face folder, in one safetensors file or several.

    Names are found with or without a leading `model.` or `transformer.`.

    Raises:
        ConfigError: a file is missing or is no safetensors file.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, tuple[Path, str]] = {}
        self._open_path: Path | None = None
        self._handle: Any = None
        self._mapped = 0
        for file, keys in _index(folder).items():
            for key in keys:
                self._files[bare_name(key)] = (folder / file, key)

    def names(self) -> dict[str, str]:
        """Each tensor's name as it stands in its file, by its bare name."""
        return {bare: key for bare, (_, key) in self._files.items()}

    def shape(self, name: str) -> tuple[int, ...] | None:
        if bare_name(name) not in self._files:
            return None
        tensor = self._slice(name)
        if tensor.get_dtype() not in _DTYPES:
            raise ConfigError(
                f"{self.where(name)}: tensor {name} has type {tensor.get_dtype()}; must be one of {', '.join(_DTYPES)}"
            )
        return tuple(tensor.get_shape())

    def read(self, name: str, rows: slice, columns: slice | None) -> torch.Tensor:
        tensor = self._slice(name)
        shape = tensor.get_shape()
        self._mapped += (rows.stop - rows.start) * math.prod(shape[1:]) * 4
        return tensor[rows] if columns is None else tensor[rows, columns]

    def where(self, name: str) -> str:
        known = self._files.get(bare_name(name))
        return str(known[0] if known else self.folder)

    def close(self) -> None:
        """Unmap the file that is open."""
        self._handle = None
        self._open_path = None
        self._mapped = 0

    def _slice(self, name: str) -> Any:
        path, key = self._files[bare_name(name)]
        if path != self._open_path or self._mapped > _REOPEN_BYTES:
            self.close()
            self._handle = _open(path)
            self._open_path = path
        try:
            return self._handle.get_slice(key)
        except SafetensorError as error:  # the index names a tensor that its file lacks
            raise ConfigError(f"{path}: tensor {key} cannot be read ({error})") from error


class RandomTensors:
    """Weights from a seed: matrices normal with a deviation of 0.02, norms 1, biases 0.

    Each block of rows has its own generator, seeded by the tensor's name, so that a rank makes only what it holds and
    the model is the same whatever the mesh.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], seed: int) -> None:
        self._shapes = shapes
        self._seed = seed
        self._last: tuple[str, int, torch.Tensor] | None = None

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self._shapes.get(name)

    def read(self, name: str, rows: slice, columns: slice | None) -> torch.Tensor:
        if columns is None:
            return torch.full((rows.stop - rows.start,), 0.0 if name.endswith("bias") else 1.0)
        per_block = max(1, _BLOCK_ELEMENTS // self._shapes[name][1])
        parts = []
        for block in range(rows.start // per_block, -(-rows.stop // per_block)):
            first = block * per_block
            part = self._block(name, block, per_block)
            parts.append(part[max(rows.start - first, 0) : rows.stop - first, columns])
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def where(self, name: str) -> str:
        return "random weights"

    def _block(self, name: str, block: int, per_block: int) -> torch.Tensor:
        if self._last is None or self._last[:2] != (name, block):
            digest = hashlib.blake2b(f"{self._seed}/{name}/{block}".encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
            tensor = torch.empty(per_block, self._shapes[name][1]).normal_(0.0, _STD, generator=generator)
            self._last = (name, block, tensor)
        return self._last[2]


def bare_name(name: str) -> str:
    """Without the leading `model.` or `transformer.` that some checkpoints leave out."""
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _index(folder: Path) -> dict[str, list[str]]:
    """The tensors' names by file: of model.safetensors, else of its shards, else of whatever files there are."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        return {"model.safetensors": list(_open(folder / "model.safetensors").keys())}
    if index.is_file():
        try:
            weight_map = dict[str, str](json.loads(index.read_text())["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{index}: not an index of safetensors files ({error!r})") from error
        files: dict[str, list[str]] = {}
        for name, file in weight_map.items():
            files.setdefault(file, []).append(name)
        for file in files:
            if not (folder / file).is_file():
                raise ConfigError(f"{folder / file}: missing, though {index.name} names it")
        return files
    return {file.name: list(_open(file).keys()) for file in sorted(folder.glob("*.safetensors"))}


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path}: not a readable safetensors file ({error})") from error
