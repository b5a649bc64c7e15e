"""The bytes of a model's numbers where some are quantized, for memory and times. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

from ..conf.schema import Architecture, EngineConfig, SimulateConfig
from ..parallel.weight_format import WeightFormat
from .huggingface import resolve_weights
from .layout import linear_weights, names_of, tensor_shapes
from .model_config import ModelValues
from .open_checkpoint import open_checkpoint
from .quantization.config import read_quantization
from .quantization.formats import FormatOf, rounded_format


@dataclass(frozen=True, slots=True)
class NumberSizes:
    """The mean bytes of weights with their scales, and what products multiply. Other numbers are of the model's type.

    Attributes:
        layers: of a weight of the layers' products; None: of the model's type.
        tables: of one of embedding and LM head.
        rounds_to: what products round activations to, where the device multiplies it; None: they stay as they are.
    """

    layers: float | None = None
    tables: float | None = None
    rounds_to: Literal["int8", "fp8"] | None = None

    def layer_bytes(self, dtype_bytes: int) -> float:
        """Return the bytes of a weight of the layers' products, where the model's type has `dtype_bytes`."""
        return dtype_bytes if self.layers is None else self.layers

    def table_bytes(self, dtype_bytes: int) -> float:
        """Return the bytes of a weight of embedding and LM head."""
        return dtype_bytes if self.tables is None else self.tables


PLAIN = NumberSizes()


def sizes_of(config: EngineConfig, arch: Architecture) -> NumberSizes:
    """Return the sizes of a model's numbers: those that `model.quantization` rounds to, else the checkpoint's.

    A checkpoint of experts counts as plain. On a CPU, floats of 8 and 4 bits become numbers of the model's type.

    Raises:
        ConfigError: the checkpoint is quantized in an unknown way.
    """
    kind, is_cpu = config.model.quantization, config.hardware.device == "cpu"
    if kind is not None:
        layer, table = (rounded_format(kind, arch.hidden_size, is_table=each) for each in (False, True))
        return PLAIN if is_cpu and kind == "fp8" else _sizes([(layer, 1)], [(table, 1)])
    format_of = None if arch.experts is not None else _checkpoint_formats(config, arch)
    if format_of is None:
        return PLAIN
    shapes, names = tensor_shapes(arch), names_of(arch)
    layers, tables = [], []
    for name in linear_weights(arch):
        found = format_of(name)
        kept = None if found is not None and found.is_float and is_cpu else found
        (tables if name in (names.embedding, names.head) else layers).append((kept, prod(shapes[name])))
    return _sizes(layers, tables)


def _checkpoint_formats(config: EngineConfig, arch: Architecture) -> FormatOf | None:
    simulated = isinstance(config, SimulateConfig)
    path = resolve_weights(config.model, tensors=not simulated)
    if path is None:
        return None
    if path.is_file() or not simulated:
        return open_checkpoint(path, arch).format
    scheme_of = read_quantization(ModelValues.read(path / "config.json"))  # there need be no tensors
    if scheme_of is None:
        return None
    shapes, transposed = tensor_shapes(arch), linear_weights(arch)

    def format_of(name: str) -> WeightFormat | None:
        scheme = scheme_of(name.removesuffix(".weight"))
        return None if scheme is None else scheme.format(shapes[name][0 if transposed[name] else 1])

    return format_of


def _sizes(layers: list[tuple[WeightFormat | None, int]], tables: list[tuple[WeightFormat | None, int]]) -> NumberSizes:
    """Return the sizes by the formats of weights, each with its number of elements. One that is plain makes all so."""
    of_layers = {format for format, _ in layers if format is not None}
    is_int8 = bool(of_layers) and all(format.int8_activations for format in of_layers)
    is_fp8 = bool(of_layers) and all(format.is_float and format.bits == 8 for format in of_layers)
    return NumberSizes(_mean(layers), _mean(tables), "int8" if is_int8 else "fp8" if is_fp8 else None)


def _mean(weights: list[tuple[WeightFormat | None, int]]) -> float | None:
    if any(format is None for format, _ in weights):
        return None
    total = sum(format.bytes_per_element * size for format, size in weights if format is not None)
    return total / sum(size for _, size in weights)
