"""The tensors of a Hugging Face folder whose linear layers are quantized."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from ...conf.architecture import Architecture
from ...conf.errors import ConfigError
from ..layout import linear_weights, names_of, tensor_shapes
from ..safetensors_folder import SafetensorsFolder, StoredTensor, bare_name
from .schemes import Mxfp4Blocks, SchemeOf, StoredLayer

if TYPE_CHECKING:
    import torch

    from ...kernels.quantized_matrix import QuantizedMatrix
    from ...kernels.weight_format import WeightFormat

_UNUSED = ("input_scale", "input_zero_point", "activation_scale")  # static scales and zero points of activations
_ZEROS = ("bias", "weight_zero_point")  # some tools write zeros if there is none
_UNIT = 32  # multiples of it never split a word or byte


class QuantizedFolder(SafetensorsFolder):
    """A `SafetensorsFolder` with quantized linear layers; `scheme_of` returns the storage scheme of each."""

    other_quantized = "does not match quantization_config"

    def __init__(self, folder: Path, arch: Architecture, scheme_of: SchemeOf) -> None:
        super().__init__(folder)
        shapes = tensor_shapes(arch)
        self._layers: dict[str, StoredLayer] = {}
        of_router = (f"{names_of(arch).router}.weight", names_of(arch).shared_gate)
        for name, transposed in linear_weights(arch).items():
            scheme = scheme_of(name.removesuffix(".weight"))
            is_part = name.endswith("]")  # of an all-experts tensor; most tools quantize linear layers only
            if scheme is None or is_part != isinstance(scheme, Mxfp4Blocks):
                continue
            rows, columns = shapes[name]
            size = (columns, rows) if transposed else (rows, columns)
            prefix, bracket, part = name.removesuffix("weight").partition("[")
            layer = StoredLayer(self, prefix, bracket + part, size, scheme, transposed)
            # Most tools leave routers unquantized without saying so in the config.
            if not name.endswith(of_router) or any(layer.has(part) for part in scheme.parts(*size) if part != "weight"):
                self._layers[name] = layer
        named = {tensor for name, shape in shapes.items() for tensor in self.parts(name, shape)}
        self._extras = {layer.prefix + part for layer in self._layers.values() for part in (*_UNUSED, *_ZEROS)} - named

    def check(self, arch: Architecture, names: Collection[str]) -> None:
        """See `TensorSource.check`."""
        super().check(arch, names)
        for name in names & self._layers.keys():
            layer = self._layers[name]
            if (wrong := layer.scheme.wrong(layer)) is not None:
                raise ConfigError(f"{self.folder}: tensor {layer.prefix}{wrong}")
            for part in _ZEROS:
                extra = layer.prefix + part
                if extra in self._extras and self.has(extra) and bool(self.tensor(extra).any()):
                    raise ConfigError(f"{self.where(extra)}: tensor {extra} is not part of the model, and not zero")

    def parts(self, name: str, shape: tuple[int, ...]) -> dict[str, StoredTensor]:
        """See `SafetensorsFolder.parts`."""
        if (layer := self._layers.get(name)) is None:
            return super().parts(name, shape)
        return {layer.tensor(part): what for part, what in layer.scheme.parts(*layer.shape).items()}

    def format(self, name: str) -> WeightFormat | None:
        """See `TensorSource.format`. Layers with activation order (`desc_act`) are dequantized."""
        layer = self._layers.get(name)
        if layer is None:
            return super().format(name)
        return None if layer.is_ordered else layer.scheme.format(layer.shape[1])

    def read_quantized(self, name: str, rows: slice, columns: slice) -> QuantizedMatrix:
        """See `TensorSource.read_quantized`."""
        return self._layers[name].scheme.read(self._layers[name], rows, columns)

    def shape(self, name: str, types: Collection[str] | None = None) -> tuple[int, ...] | None:
        """See `SafetensorsFolder.shape`; without `types`, a quantized weight has its dequantized shape."""
        if types is not None:
            return super().shape(name, types)
        if (layer := self._layers.get(name)) is not None:
            return layer.shape[::-1] if layer.is_transposed else layer.shape
        return super().shape(name)

    def read(self, name: str, rows: slice, columns: slice | None) -> torch.Tensor:
        """See `TensorSource.read`: float32 if the tensor is quantized."""
        if (layer := self._layers.get(name)) is None or columns is None:
            return super().read(name, rows, columns)
        if layer.is_transposed:
            rows, columns = columns, rows
        first = columns.start // _UNIT * _UNIT
        whole = slice(first, min(-(-columns.stop // _UNIT) * _UNIT, layer.shape[1]))
        numbers = layer.scheme.read(layer, rows, whole).dequantized()[:, columns.start - first : columns.stop - first]
        return numbers.T if layer.is_transposed else numbers

    def _check_others(self, arch: Architecture, known: Collection[str]) -> None:
        super()._check_others(arch, {*known, *(bare_name(name) for name in self._extras)})
