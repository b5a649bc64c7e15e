"""Reads the tensors of a checkpoint: checks headers, then reads slice by slice. Here: safetensors."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from safetensors import SafetensorError, safe_open

from ..conf import strict_json
from ..conf.errors import ConfigError
from ..conf.schema import Architecture
from .layout import names_of, tensor_shapes

if TYPE_CHECKING:
    import torch

_PREFIXES = ("model.", "transformer.")
_MAX_MAPPED_BYTES = 16 << 20  # then the file is reopened: pages of a mapped file count as memory of this process
_DTYPES = ("F64", "F32", "BF16", "F16")  # smaller types are quantized weights, whose scales are separate tensors


class TensorSource(Protocol):
    """A source of tensors by name, from which a rank reads only the slices that it holds."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of the whole tensor; None where there is no tensor of this name."""
        ...

    def read(self, name: str, rows: slice, columns: slice | None) -> torch.Tensor:
        """Read a slice to the CPU, in the source's own type. `columns` is None for a vector."""
        ...


class Checkpoint(TensorSource, Protocol):
    """A `TensorSource` in files."""

    def check(self, arch: Architecture, names: Collection[str]) -> None:
        """Check that there are the tensors `names` in the shapes of `arch`, and no unknown tensors.

        Raises:
            ConfigError: a tensor is missing, has the wrong shape or type, or is not part of the architecture.
        """
        ...

    def close(self) -> None:
        """Close what is open."""
        ...


def check_shape(
    names: str, where: str, found: tuple[int, ...] | None, expected: tuple[int, ...], *, may_be_longer: bool
) -> None:
    """Check the shape of a tensor, which is called `names` in the file `where`.

    Args:
        names: the tensor's name, for errors.
        where: the file, for errors.
        found: the tensor's shape; None where it is missing.
        expected: the shape that the architecture has.
        may_be_longer: whether it may have more rows, as positions where model.max_model_len is below the checkpoint's.

    Raises:
        ConfigError: it is missing or has another shape.
    """
    if found is None:
        raise ConfigError(f"{where}: tensor {names}, of shape {list(expected)}, is missing")
    fits = found == expected
    if may_be_longer:
        fits = len(found) == 2 and found[0] >= expected[0] and found[1] == expected[1]
    if not fits:
        raise ConfigError(f"{where}: tensor {names} has shape {list(found)}, not {list(expected)}")


class SafetensorsFolder:
    """The tensors of a Hugging Face folder, in one safetensors file or several. A `Checkpoint`.

    A tensor is found under its name with or without a leading `model.` or `transformer.`.

    Raises:
        ConfigError: a file is missing or is no safetensors file.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, tuple[Path, str]] = {}
        self._open_as: tuple[Path, str] | None = None
        self._handle: Any = None
        self._mapped_bytes = 0
        for file, keys in _tensors_by_file(folder).items():
            for key in keys:
                self._files[bare_name(key)] = (folder / file, key)

    def check(self, arch: Architecture, names: Collection[str]) -> None:
        """See `Checkpoint.check`."""
        shapes = tensor_shapes(arch)
        bare = {bare_name(name) for name in shapes}
        buffers = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")  # frequencies and masks: computed here
        for name, (file, key) in self._files.items():
            if name not in bare and not name.endswith(buffers) and name != "lm_head.weight":
                raise ConfigError(f"{file}: tensor {key} is not part of the architecture in config.json")
        for name in sorted(names, key=self.where):
            longer = name == names_of(arch).positions
            check_shape(name, self.where(name), self.shape(name), shapes[name], may_be_longer=longer)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of the whole tensor; None where there is no tensor of this name.

        Raises:
            ConfigError: the tensor is of a type that is not supported.
        """
        if bare_name(name) not in self._files:
            return None
        tensor = self._slice(name)
        if tensor.get_dtype() not in _DTYPES:
            raise ConfigError(
                f"{self.where(name)}: tensor {name} has type {tensor.get_dtype()}; must be one of {', '.join(_DTYPES)}"
            )
        return tuple(tensor.get_shape())

    def read(self, name: str, rows: slice, columns: slice | None) -> torch.Tensor:
        """See `TensorSource.read`. A file is opened anew once much of it has been read, to release its memory."""
        tensor = self._slice(name, "pt")
        shape = tensor.get_shape()
        self._mapped_bytes += (rows.stop - rows.start) * math.prod(shape[1:]) * 4
        share: torch.Tensor = tensor[rows] if columns is None else tensor[rows, columns]
        return share

    def where(self, name: str) -> str:
        """Return the file that holds a tensor, or the folder where none does: for errors."""
        known = self._files.get(bare_name(name))
        return str(known[0] if known else self.folder)

    def close(self) -> None:
        """Close the open file, which unmaps it."""
        self._handle = None
        self._open_as = None
        self._mapped_bytes = 0

    def _slice(self, name: str, framework: str | None = None) -> Any:
        """Return a lazy slice of a tensor. If another file is open, close it and open the tensor's file.

        `framework` is "pt" to read torch tensors. For shapes and types None is enough, which any open file satisfies.
        """
        path, key = self._files[bare_name(name)]
        is_open = self._open_as is not None and self._open_as[0] == path and framework in (None, self._open_as[1])
        if not is_open or self._mapped_bytes > _MAX_MAPPED_BYTES:
            self.close()
            self._open_as = (path, framework or "np")
            self._handle = _open(*self._open_as)
        try:
            return self._handle.get_slice(key)
        except SafetensorError as error:  # the index names a tensor that its file lacks
            raise ConfigError(f"{path}: tensor {key} cannot be read ({error})") from error


def bare_name(name: str) -> str:
    """Return the name without the leading `model.` or `transformer.`, which some checkpoints leave out."""
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _tensors_by_file(folder: Path) -> dict[str, list[str]]:
    """Return tensor names by file: of model.safetensors, else of the index's shards, else of all *.safetensors."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        return {"model.safetensors": list(_open(folder / "model.safetensors").keys())}
    if index.is_file():
        try:
            weight_map = dict[str, str](strict_json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        except ConfigError as error:
            raise ConfigError(f"{index}: {error}") from None
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(f"{index}: not an index of safetensors files ({error!r})") from error
        files: dict[str, list[str]] = {}
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file or "\0" in file:
                raise ConfigError(f"{index}: {file!r} must be the name of a file in this folder, without a path")
            files.setdefault(file, []).append(name)
        for file in files:
            if not (folder / file).is_file():
                raise ConfigError(f"{folder / file}: missing, though {index.name} names it")
        return files
    return {file.name: list(_open(file).keys()) for file in sorted(folder.glob("*.safetensors"))}


def _open(path: Path, framework: str = "np") -> Any:
    """Open a safetensors file. The framework `np` reads names and shapes without importing torch."""
    try:
        return safe_open(path, framework=framework, device="cpu")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path}: not a readable safetensors file ({error})") from error
