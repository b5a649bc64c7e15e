"""Opens the tensors of a model: of a folder of safetensors files, of a GGUF file, or random ones."""

from __future__ import annotations

from pathlib import Path

from ..conf.architecture import Architecture
from ..conf.errors import ConfigError
from ..kernels.weight_format import WeightFormat
from .checkpoint import SafetensorsFolder, TensorSource
from .gguf.weights import GgufTensors
from .layout import linear_weights, tensor_shapes
from .model_config import ModelValues
from .quantization.config import read_quantization
from .quantization.folder import QuantizedFolder
from .quantization.formats import FormatOf, rounded_formats


def open_checkpoint(path: Path, arch: Architecture) -> TensorSource:
    """Open the checkpoint in a folder or a GGUF file.

    Raises:
        ConfigError: a file is missing, or is not what its name says, or its weights are quantized in an unknown way.
    """
    if not path.is_dir():
        return GgufTensors(path, arch)
    scheme_of = read_quantization(ModelValues.read(path / "config.json"))
    return SafetensorsFolder(path) if scheme_of is None else QuantizedFolder(path, arch, scheme_of)


def open_source(path: Path | None, arch: Architecture, seed: int, quantization: str | None) -> TensorSource:
    """Open the tensors of a model: of a folder or file, or random ones from `seed` where `path` is None.

    Args:
        path: as `resolve_weights` returns it.
        arch: of the model.
        seed: of random weights.
        quantization: what the numbers are rounded to as they are read, `model.quantization`.

    Raises:
        ConfigError: as of `open_checkpoint`; or weights that are quantized already are to be rounded.
    """
    if path is None:
        from .random_weights import RandomTensors

        source: TensorSource = RandomTensors(tensor_shapes(arch), seed)
    else:
        source = open_checkpoint(path, arch)
    if quantization is None:
        return source
    held = (source.format(name) for name in linear_weights(arch))
    if any(format is not None and format.bits < 16 for format in held):
        raise ConfigError(
            f"model.quantization={quantization}: {path} has quantized weights, which stay as they are; must be null"
        )
    from .quantization.rounding import RoundedTensors

    return RoundedTensors(source, arch, quantization)


def stated_formats(path: Path | None, arch: Architecture, quantization: str | None) -> FormatOf:
    """Return the formats of a model's weights by its config alone, or a GGUF file's header: for simulations.

    The arguments are those of `open_source`.
    """
    if quantization is not None:
        return rounded_formats(quantization, arch)
    if path is not None and path.is_file():
        return GgufTensors(path, arch).format
    scheme_of = None if path is None else read_quantization(ModelValues.read(path / "config.json"))
    shapes, transposed = tensor_shapes(arch), linear_weights(arch)

    def format_of(name: str) -> WeightFormat | None:
        if scheme_of is None or name not in transposed or (scheme := scheme_of(name.removesuffix(".weight"))) is None:
            return None
        return scheme.format(shapes[name][0 if transposed[name] else 1])

    return format_of
