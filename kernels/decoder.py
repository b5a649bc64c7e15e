"""All decoder layers of a stage in one C++ call (`decoder.cpp`), for a micro-batch of decodes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from ctypes import Array, Structure, byref, c_double, c_int64, c_void_p, cast
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from .cache_rows import cpp_cache
from .cpp_library import CppFile, addresses, load
from .cpp_product import CppProduct
from .head_norm import HeadNorm
from .operators.cpp import CppKernels
from .shared_memory import Reduction

_FILE = CppFile("decoder", decode="ppppi:i")
_OPERATORS = ("add_and_norm", "gated_silu", "rotate_and_write", "attend_decodes")


class _Stage(Structure):
    """`Stage` of `decoder.cpp`."""

    _fields_ = (
        *((name, c_void_p) for name in (*_OPERATORS, "layers")),
        *((name, c_int64) for name in ("num_layers", "H", "K", "G", "D", "F")),
        *((name, c_int64) for name in ("cache_kind", "cache_head", "block_size")),
        *((name, c_double) for name in ("eps", "head_eps")),
    )


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """A layer's weights and cache, as `Layer` of `decoder.cpp`.

    Attributes:
        products: qkv, out, fc1 and fc2, each with the bias that it adds.
        norms: weight and bias of the norms before attention and the feed-forward network.
        head_norm: the QK norm.
        cache: keys and values.
        tables: index of the layer's `DecodeTables`.
    """

    products: Sequence[tuple[CppProduct, Tensor | None]]
    norms: Sequence[tuple[Tensor, Tensor | None]]
    head_norm: HeadNorm | None
    cache: tuple[Tensor, Tensor]
    tables: int

    def words(self) -> list[int | None]:
        """Return the struct's fields."""
        words: list[int | None] = []
        for product, bias in self.products:
            words += [product.function, product.weight, *addresses(bias)]
        for norm in self.norms:
            words += addresses(*norm)
        own = self.head_norm
        words += (None, None) if own is None else addresses(own.query_weight, own.key_weight)
        return [*words, *addresses(*self.cache), self.tables]


def decode_tables(
    slots: Tensor, rope: tuple[Tensor, Tensor] | None, starts: np.ndarray, blocks: np.ndarray, window: int
) -> list[int | None]:
    """Return the fields of `Tables` of `decoder.cpp`: what layers of a kind share in a micro-batch."""
    at = starts.ctypes.data, blocks.ctypes.data, blocks.shape[1]
    return [*addresses(slots, *(rope or (None, None))), *at, window]


class StageDecoder:
    """The decoder layers of a stage.

    Args:
        kernels: the layers' operators.
        layers: the layers' weights, which this object keeps alive.
        sizes: the fields of `_Stage` from `H` to `F`, for this rank, and `block_size`, `eps` and `head_eps`.
    """

    def __init__(self, kernels: CppKernels, layers: Sequence[DecoderWeights], **sizes: float) -> None:
        self._layers, self._words = layers, _words(word for layer in layers for word in layer.words())
        operators = dict.fromkeys(_OPERATORS, kernels.library) | {"attend_decodes": kernels.attention.library}
        functions = {name: cast(getattr(library, name), c_void_p).value for name, library in operators.items()}
        kind, _, _, head = cpp_cache(*layers[0].cache)
        given = {"num_layers": len(layers), "cache_kind": kind, "cache_head": head, **sizes}
        self._stage = _Stage(**functions, layers=cast(self._words, c_void_p), **given)
        self._decode = load(_FILE, kernels.dtype).decode

    def __call__(self, x_TH: Tensor, tables: Iterable[int | None], ranks: Reduction | None) -> int:
        """Compute the layers on the contiguous x, in place; return the code of its all-reduces.

        Args:
            x_TH: a row per decode.
            tables: `decode_tables` of each kind of layer, one after the other.
            ranks: how tensor-parallel ranks sum; None: there is one rank.
        """
        arguments = byref(self._stage), _words(tables), None if ranks is None else byref(ranks)
        code: int = self._decode(*arguments, x_TH.data_ptr(), len(x_TH))
        return code


def _words(numbers: Iterable[int | None]) -> Array[c_int64]:
    """Return a struct whose fields are pointers and int64."""
    words = [number or 0 for number in numbers]
    return (c_int64 * len(words))(*words)
