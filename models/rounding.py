"""What a model's numbers are rounded to, and the bytes that they take. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..conf.schema import EngineConfig

WeightRounding = Literal["int8", "int4", "fp8"]
CacheRounding = Literal["int8", "fp8"]

# Bytes of a weight with its scales: one a row of 8 bits, which are left out; one of 32 bits for 64 weights of 4 bits.
_WEIGHT_BYTES: dict[WeightRounding, float] = {"int8": 1.0, "fp8": 1.0, "int4": 0.5 + 4 / 64}
_CACHE_SCALE_BYTES = 4  # of a token's key or value of one head


@dataclass(frozen=True, slots=True)
class Rounding:
    """What the weights of layers' products, and keys and values, are rounded to; None: they are of the model's type.

    Embedding, LM head, norms and routers are of the model's type.
    """

    weights: WeightRounding | None = None
    cache: CacheRounding | None = None

    def weight_bytes(self, dtype_bytes: int) -> float:
        """Return the bytes of a weight, in a model whose type has `dtype_bytes`."""
        return dtype_bytes if self.weights is None else _WEIGHT_BYTES[self.weights]

    def head_bytes(self, head_dim: int, dtype_bytes: int) -> int:
        """Return the bytes of one token's key, or value, of one head."""
        return head_dim * dtype_bytes if self.cache is None else head_dim + _CACHE_SCALE_BYTES


NONE = Rounding()


def rounding_of(config: EngineConfig) -> Rounding:
    """Return what a config asks for."""
    return Rounding(config.model.quantization)
