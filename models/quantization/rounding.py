"""Weights that are rounded as they are loaded: `model.quantization`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from math import gcd

import torch

from ...conf.architecture import Architecture
from ...kernels.quantized_matrix import QuantizedMatrix
from ...kernels.weight_format import WeightFormat
from ..checkpoint import TensorSource
from ..layout import linear_weights
from .formats import rounded_formats
from .matrices import round_to


class RoundedTensors(TensorSource):
    """The tensors of another source, its matrices rounded as `rounded_formats` says.

    Each rank rounds what it holds: a row that is cut among ranks has a scale for each part.
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
        """See `TensorSource.read`: the numbers as they were, before they are rounded."""
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
