"""A model's checkpoint: a safetensors folder, a GGUF file, or random weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from ..conf.architecture import Architecture
from ..conf.errors import ConfigError
from ..conf.schema import Dtype, ModelConfig
from ..kernels.processor import multiplies_bfloat16
from ..kernels.weight_format import WeightFormat
from .find_weights import find_weights
from .gguf.config import config_values
from .gguf.file import open_gguf
from .gguf.weights import GgufTensors
from .layout import linear_weights, tensor_shapes
from .model_config import ModelValues
from .quantization.config import read_quantization
from .quantization.folder import QuantizedFolder
from .quantization.formats import FormatOf, rounded_formats
from .read_architecture import read_architecture
from .safetensors_folder import SafetensorsFolder, TensorSource

_SIZE_FIELDS = ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "ffn_size")
_SHORT = ("bfloat16", "float16", "half")
_LONG_GGUF = (0, 28)  # F32 and F64


@dataclass(frozen=True)
class Checkpoint:
    """The files of a model, found once.

    Attributes:
        model: names them.
        path: the Hugging Face folder or the GGUF file; None for random weights.
        has_tensors: whether tensors were asked for; a simulation needs only a folder's config.json.
    """

    model: ModelConfig
    path: Path | None
    has_tensors: bool

    @classmethod
    def open(cls, model: ModelConfig, *, tensors: bool = True) -> Checkpoint:
        """Find a model's files.

        Raises:
            ConfigError: the folder or file is missing, or lacks what loading needs.
        """
        return cls(model, find_weights(model, tensors=tensors), tensors)

    @property
    def is_gguf(self) -> bool:
        """Whether it is a GGUF file."""
        return self.path is not None and self.path.is_file()

    @property
    def tokenizer(self) -> str | None:
        """The path of the tokenizer; None: UTF-8 bytes."""
        return self.model.tokenizer or (None if self.path is None else str(self.path))

    @cached_property
    def config(self) -> ModelValues | None:
        """What config.json says, or a GGUF header in its keys; None for random weights.

        Raises:
            ConfigError: a file is not valid JSON or GGUF.
        """
        if self.path is None:
            return None
        if self.is_gguf:
            return ModelValues(self.path, config_values(open_gguf(self.path)))
        return ModelValues.read(self.path / "config.json")

    @cached_property
    def arch(self) -> Architecture:
        """The architecture, of `model.architecture` for random weights; `model.max_model_len` is its `max_position`.

        Raises:
            ConfigError: it is unknown, has a feature that is not supported, or contradicts `model`.
        """
        model = self.model
        if self.path is None:
            assert model.architecture is not None
            arch = model.architecture
        else:
            assert self.config is not None
            arch = read_architecture(self.path, self.config, tensors=self.has_tensors)
            if model.architecture is not None:
                self._check_sizes(model.architecture, arch)
        if model.max_model_len is None:
            return arch
        if model.max_model_len > arch.max_position:
            raise ConfigError(
                f"model.max_model_len={model.max_model_len}: must be at most the model's {arch.max_position}"
            )
        return replace(arch, max_position=model.max_model_len)

    def _check_sizes(self, given: Architecture, found: Architecture) -> None:
        for size in _SIZE_FIELDS:
            if getattr(given, size) != getattr(found, size):
                raise ConfigError(
                    f"model.architecture.{size}={getattr(given, size)}: {self.path} has {getattr(found, size)}; leave "
                    "model.architecture out for a folder or file"
                )

    @property
    def is_short(self) -> bool:
        """Whether it declares weights of 16 bits or fewer; random weights have 32."""
        if self.path is None or self.config is None:
            return False
        if self.is_gguf:
            places = open_gguf(self.path).tensors.values()
            return any(place.type not in _LONG_GGUF for place in places if len(place.shape) > 1)
        if read_quantization(self.config) is not None:
            return True
        return str(self.config.get("dtype", self.config.get("torch_dtype"))).removeprefix("torch.") in _SHORT

    def dtype(self, device: str) -> Dtype:
        """Return the dtype of activations and unquantized weights, resolving `model.dtype=auto` on this machine.

        `auto` is bfloat16 on CUDA. On a CPU it is bfloat16 if the weights have 16 bits or fewer and the processor
        multiplies bfloat16; else float32.
        """
        if self.model.dtype != "auto":
            return self.model.dtype
        is_fast = device.startswith("cuda") or (multiplies_bfloat16() and self.is_short)
        return "bfloat16" if is_fast else "float32"

    def tensors(self, arch: Architecture, seed: int = 0) -> TensorSource:
        """Open the tensors, quantized on load if `model.quantization` is set. Random weights come from `seed`.

        Raises:
            ConfigError: a file is missing or has the wrong format, its quantization is unknown, or
                `model.quantization` is set for weights that are quantized already.
        """
        if self.path is None:
            from .random_weights import RandomTensors

            source: TensorSource = RandomTensors(tensor_shapes(arch), seed)
        elif self.is_gguf:
            source = GgufTensors(self.path, arch)
        else:
            assert self.config is not None
            scheme_of = read_quantization(self.config)
            folder = self.path
            source = SafetensorsFolder(folder) if scheme_of is None else QuantizedFolder(folder, arch, scheme_of)
        quantization = self.model.quantization
        if quantization is None:
            return source
        held = (source.format(name) for name in linear_weights(arch))
        if any(format is not None and format.bits < 16 for format in held):
            raise ConfigError(
                f"model.quantization={quantization}: {self.path} has quantized weights, which stay as they are; "
                "must be null"
            )
        from .quantization.rounding import RoundedTensors

        return RoundedTensors(source, arch, quantization)

    def stated_formats(self, arch: Architecture) -> FormatOf:
        """Return the formats of the weights from only the config or the GGUF header, for simulations."""
        if self.model.quantization is not None:
            return rounded_formats(self.model.quantization, arch)
        if self.path is not None and self.is_gguf:
            return GgufTensors(self.path, arch).format
        scheme_of = None if self.config is None else read_quantization(self.config)
        shapes, transposed = tensor_shapes(arch), linear_weights(arch)

        def format_of(name: str) -> WeightFormat | None:
            if scheme_of is None or name not in transposed:
                return None
            scheme = scheme_of(name.removesuffix(".weight"))
            return None if scheme is None else scheme.format(shapes[name][0 if transposed[name] else 1])

        return format_of
