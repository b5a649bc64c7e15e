"""Quantization of weights on load: `model.quantization`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from math import gcd

import torch

from ...conf.architecture import Architecture
from ...kernels.quantized_matrix import QuantizedMatrix
from ...kernels.weight_format import WeightFormat
from ..layout import linear_weights
from ..safetensors_folder import TensorSource
from .formats import rounded_formats
from .matrices import round_to


class RoundedTensors(TensorSource):
    """The tensors of another source, with matrices quantized to `rounded_formats`.

    Each rank quantizes its own shard: a row that is split across ranks has one scale per shard.
    """

    def __init__(self, source: TensorSource, arch: Architecture, kind: str) -> None:
        self._source = source
        self._transposed = linear_weights(arch)
        self._formats = rounded_formats(kind, arch)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """See `TensorSource.shape`."""
        return self._source.shape(name)

    def format(self, name: str) -> WeightFormat | None:
        """See `TensorSource.format`."""
        return self._formats(name)

    def read(self, name: str, rows: slice, columns: slice | None) -> torch.Tensor:
        """See `TensorSource.read`: the original values, before quantization."""
        return self._source.read(name, rows, columns)

    def read_quantized(self, name: str, rows: slice, columns: slice) -> QuantizedMatrix:
        """See `TensorSource.read_quantized`."""
        format = self._formats(name)
        assert format is not None, name
        is_transposed = self._transposed[name]
        numbers = self.read(name, *((columns, rows) if is_transposed else (rows, columns)))
        group = gcd(format.group, columns.stop - columns.start)
        return round_to(numbers.T if is_transposed else numbers, replace(format, group=group))

    def check(self, arch: Architecture, names: Collection[str]) -> None:
        """See `TensorSource.check`."""
        self._source.check(arch, names)

    def close(self) -> None:
        """See `TensorSource.close`."""
        self._source.close()
