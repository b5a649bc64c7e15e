"""Reads a checkpoint's tensors: checks headers, then reads slices. This file implements safetensors."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from ..conf.architecture import Architecture
from ..conf.errors import ConfigError, reason
from ..kernels.weight_format import SHORT, WeightFormat
from .json_file import read_object, refuse_pointer
from .layout import deciding_keys, names_of, tensor_shapes

if TYPE_CHECKING:
    import torch

    from ..kernels.quantized_matrix import QuantizedMatrix

# The first is PEFT's, in merged models; the third is the text model of multimodal models.
_PREFIXES = ("base_model.model.", "model.", "language_model.", "model.", "transformer.")
_MAX_MAPPED_BYTES = 16 << 20  # then the file is reopened: mapped pages count as memory of this process
FLOATS = ("F64", "F32", "BF16", "F16")  # smaller types are quantized weights with separate scales
_SHARD = re.compile(r"(.+)-(\d+)-of-(\d+)\.safetensors")
_OTHERS = ("consolidated", "adapter_")  # the same weights in Mistral's layout, and adapters
_OTHER_INPUT = ("vision_tower.", "multi_modal_projector.")  # image encoders, which text-only inference ignores
# Rotary frequencies and masks, which are recomputed instead.
_MASKS = tuple(f".{part}.{of}" for part in ("attn", "attention") for of in ("bias", "masked_bias"))
_BUFFERS = (*(f"rotary_emb.{of}" for of in ("inv_freq", "cos_cached", "sin_cached")), *_MASKS)
# Names of quantized weights' parts: GPTQ and AWQ, compressed-tensors and FP8, bitsandbytes.
_QUANTIZED = ("qweight", "qzeros", "scales", "g_idx", "weight_", "absmax", "nested_", "quant_", "SCB")
_QUANTIZED_ENDS = ("_scale", "_blocks", "_scales")  # the last two are MXFP4's


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Requirements on a checkpoint's tensor: its shape, and its types by safetensors' names."""

    shape: tuple[int, ...]
    types: tuple[str, ...] = FLOATS
    optional: bool = False


class TensorSource:
    """A source of tensors by name. A rank reads only its own shards."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of the whole tensor; None if there is no tensor of this name."""
        raise NotImplementedError

    def read(self, name: str, rows: slice, columns: slice | None) -> torch.Tensor:
        """Read a slice to the CPU, in the source's own type. `columns` is None for a vector."""
        raise NotImplementedError

    def format(self, name: str) -> WeightFormat | None:
        """Return a weight's storage format in the source; None if it is plain float32 or missing."""
        return None

    def read_quantized(self, name: str, rows: slice, columns: slice) -> QuantizedMatrix:
        """Read a slice of the [out, in] weight in its format, with smaller groups if the columns cut a group."""
        raise AssertionError(f"{name} is not quantized")

    def check(self, arch: Architecture, names: Collection[str]) -> None:
        """Check that files have the tensors `names` in the shapes of `arch`, and no unknown tensors.

        Raises:
            ConfigError: a tensor is missing, has the wrong shape or type, or is not part of the architecture.
        """

    def close(self) -> None:
        """Close open files."""


def check_shape(
    names: str,
    where: str,
    found: tuple[int, ...] | None,
    expected: tuple[int, ...],
    *,
    may_be_longer: bool,
    why: Callable[[], str] = lambda: "",
) -> None:
    """Check the shape of a tensor.

    Args:
        names: the tensor's name, for errors.
        where: the file, for errors.
        found: the tensor's shape; None if it is missing.
        expected: the shape according to the architecture.
        why: the reason for the shape, for errors.
        may_be_longer: allow more rows, as for learned positions if model.max_model_len is below the checkpoint's.

    Raises:
        ConfigError: it is missing or has another shape.
    """
    if found is None:
        raise ConfigError(f"{where}: tensor {names}, of shape {list(expected)}, is missing{why()}")
    fits = found == expected
    if may_be_longer:
        fits = len(found) == 2 and found[0] >= expected[0] and found[1] == expected[1]
    if not fits:
        raise ConfigError(f"{where}: tensor {names} has shape {list(found)}, not {list(expected)}{why()}")


class SafetensorsFolder(TensorSource):
    """The tensors of a Hugging Face folder, in one safetensors file or several.

    A tensor is found under its name with or without a leading `base_model.model.`, `model.` or `transformer.`.

    Raises:
        ConfigError: a file is missing or is not a safetensors file.
    """

    other_quantized = "is quantized, but config.json has no quantization_config"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, tuple[Path, str]] = {}
        self._open_as: tuple[Path, str] | None = None
        self._handle: Any = None
        self._mapped_bytes = 0
        for file, keys in _tensors_by_file(folder).items():
            for key in keys:
                other = self._files.setdefault(bare_name(key), (folder / file, key))
                if other != (folder / file, key):
                    raise ConfigError(f"{folder / file}: tensor {key} is also in {other[0]}, as {other[1]}")

    def check(self, arch: Architecture, names: Collection[str]) -> None:
        """See `TensorSource.check`."""
        shapes = tensor_shapes(arch)
        parts = {name: self.parts(name, shape) for name, shape in shapes.items()}
        self._check_others(arch, {_stored(tensor) for each in parts.values() for tensor in each})
        wanted = [(tensor, part, name) for name in names for tensor, part in parts[name].items()]
        for tensor, part, name in sorted(wanted, key=lambda each: self.where(each[0])):
            longer, why = name == names_of(arch).positions, partial(deciding_keys, arch, name)
            if part.optional and not self.has(tensor):
                continue
            found = self.shape(tensor, part.types)
            if math.prod(part.shape) == 1 and found is not None and math.prod(found) == 1:
                continue
            check_shape(tensor, self.where(tensor), found, part.shape, may_be_longer=longer, why=why)

    def _check_others(self, arch: Architecture, known: Collection[str]) -> None:
        """Check that all tensors are `known`, by their bare names, or can be ignored."""
        further = _further_layers(arch)
        others = [
            name
            for name in self._files
            if not (name in known or further(name) or name.endswith(_BUFFERS) or name.startswith(_OTHER_INPUT))
        ]
        for name in sorted(others, key=lambda name: not _is_quantized(name)):
            file, key = self._files[name]
            if _is_quantized(name):
                raise ConfigError(f"{file}: tensor {key}: {self.other_quantized}")
            if ".lora_" in name or ".base_layer." in name or key.startswith("base_model."):
                raise ConfigError(f"{file}: tensor {key} is of a LoRA adapter; merge it into its base model first")
            why = deciding_keys(arch, name) or " in config.json"
            raise ConfigError(f"{file}: tensor {key} is not part of the architecture{why}")

    def parts(self, name: str, shape: tuple[int, ...]) -> dict[str, StoredTensor]:
        """Return the stored tensors that make up one tensor of the architecture."""
        return {name: StoredTensor(shape)}

    def shape(self, name: str, types: Collection[str] = FLOATS) -> tuple[int, ...] | None:
        """Return the shape of the whole tensor; None if there is no tensor of this name.

        Raises:
            ConfigError: the tensor's type is not in `types`.
        """
        if _stored(name) not in self._files:
            return None
        tensor = self._slice(name)
        if tensor.get_dtype() not in types:
            why = f" ({self.other_quantized})" if types is FLOATS else ""
            found = f"{self.where(name)}: tensor {name} has type {tensor.get_dtype()}"
            raise ConfigError(f"{found}; must be one of {', '.join(types)}{why}")
        shape = tuple(tensor.get_shape())
        return shape if _part(name) is None else shape[1:]

    def read(self, name: str, rows: slice, columns: slice | None) -> torch.Tensor:
        """See `TensorSource.read`."""
        return self.tensor(name, rows, columns)

    def format(self, name: str) -> WeightFormat | None:
        """See `TensorSource.format`."""
        return SHORT.get(self._slice(name).get_dtype()) if self.has(name) else None

    def has(self, name: str) -> bool:
        """Return whether the files have a tensor of this name."""
        return _stored(name) in self._files

    def tensor(self, name: str, rows: slice | None = None, columns: slice | None = None) -> torch.Tensor:
        """Read a stored tensor or a slice of it, in its own type.

        The file is reopened after 16 MiB have been read, to release its mapped memory.
        """
        tensor, part = self._slice(name, "pt"), _part(name)
        shape = tensor.get_shape() if part is None else tensor.get_shape()[1:]
        if rows is None and columns is None:
            whole: torch.Tensor = self._handle.get_tensor(self._files[bare_name(name)][1])
            return whole
        rows = rows or slice(0, shape[0])
        self._mapped_bytes += (rows.stop - rows.start) * math.prod(shape[1:]) * 4
        at = (rows,) if columns is None else (rows, columns)
        share: torch.Tensor = tensor[at if part is None else (part, *at)]
        return share

    def where(self, name: str) -> str:
        """Return the file that contains a tensor, or the folder if none does, for errors."""
        known = self._files.get(_stored(name))
        return str(known[0] if known else self.folder)

    def close(self) -> None:
        """Close the open file, which unmaps it."""
        self._handle = None
        self._open_as = None
        self._mapped_bytes = 0

    def _slice(self, name: str, framework: str | None = None) -> Any:
        """Return a lazy slice of a tensor. If another file is open, close it and open the tensor's file.

        `framework` is "pt" to read torch tensors. None, for shapes and types, accepts a file opened with either.
        """
        path, key = self._files[_stored(name)]
        is_open = self._open_as is not None and self._open_as[0] == path and framework in (None, self._open_as[1])
        if not is_open or self._mapped_bytes > _MAX_MAPPED_BYTES:
            self.close()
            self._open_as = (path, framework or "np")
            self._handle = _open(*self._open_as)
        return self._handle.get_slice(key)


def _stored(name: str) -> str:
    """Return the bare name of the stored tensor. `NAME[3]` is its index 3 along the first dimension."""
    return bare_name(name).partition("[")[0]


def _part(name: str) -> int | None:
    """Return the index along the stored tensor's first dimension; None: the whole tensor."""
    return int(name[:-1].partition("[")[2]) if name.endswith("]") else None


def _further_layers(arch: Architecture) -> Callable[[str], bool]:
    """Return a predicate on bare names for multi-token-prediction (MTP) layers."""
    names = names_of(arch)
    layer = re.compile(re.escape(bare_name(names.layer)).replace(r"\{\}", r"(\d+)"))

    def is_further(name: str) -> bool:
        found = layer.match(name)
        return names.further_layers and (name.startswith("mtp_") if found is None else int(found[1]) >= arch.num_layers)

    return is_further


def bare_name(name: str) -> str:
    """Return the name without prefixes that some checkpoints add, such as `model.` or `transformer.`."""
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _is_quantized(name: str) -> bool:
    return any(part.startswith(_QUANTIZED) or part.endswith(_QUANTIZED_ENDS) for part in name.split("."))


def _tensors_by_file(folder: Path) -> dict[str, list[str]]:
    """Return tensor names by file: model.safetensors, else the index's shards, else all safetensors files."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        return _open_all(folder, ["model.safetensors"])
    if not index.is_file():
        return _open_all(folder, _without_index(folder))
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{index}: not an index of safetensors files (weight_map={str(weight_map)[:60]})")
    for file in weight_map.values():
        if not isinstance(file, str) or Path(file).name != file or "\0" in file:
            raise ConfigError(f"{index}: {file!r} must be the name of a file in this folder, without a path")
        if not (folder / file).is_file():
            raise ConfigError(f"{folder / file}: missing, though {index.name} names it")
    files = _open_all(folder, dict.fromkeys(weight_map.values()))
    held = {(file, key) for file, keys in files.items() for key in keys}
    for key, file in weight_map.items():
        if (file, key) not in held:
            raise ConfigError(f"{folder / file}: tensor {key} is missing, though {index.name} names it")
    return files


def _without_index(folder: Path) -> list[str]:
    """Return the safetensors files of a folder without an index. Shards must be complete and of one save."""
    names = sorted(path.name for path in folder.glob("*.safetensors") if not path.name.startswith(_OTHERS))
    shards = [match for name in names if (match := _SHARD.fullmatch(name))]
    if len({(shard[1], shard[3]) for shard in shards}) > 1:
        raise ConfigError(f"{folder}: shards of several saves ({shards[0][0]}, {shards[-1][0]}); keep those of one")
    if shards and len(shards) != int(shards[0][3]):
        raise ConfigError(f"{folder}: {len(shards)} of {int(shards[0][3])} shards ({shards[0][0]}); fetch the others")
    return names


def _open_all(folder: Path, files: Iterable[str]) -> dict[str, list[str]]:
    return {file: list(_open(folder / file).keys()) for file in files}


def _open(path: Path, framework: str = "np") -> Any:
    """Open a safetensors file. The framework `np` reads names and shapes without importing torch."""
    refuse_pointer(path)
    try:
        return safe_open(path, framework=framework, device="cpu")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path}: not a readable safetensors file; is it cut short? ({reason(error)})") from error
