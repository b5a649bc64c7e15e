"""Runs decode-only micro-batches through all layers of a stage in one C++ call (`decoder.cpp`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from ctypes import Array, Structure, byref, c_double, c_int64, c_void_p, cast

import torch.nn.functional as F
from torch import Tensor

from ..kernels.cpp_library import addresses, find
from ..kernels.cpp_product import CppProduct
from ..parallel.groups import Groups
from ..parallel.layers import ColumnParallelLinear, RowParallelLinear
from .attention.cpp import CppBackend, CppPlan
from .batch_context import BatchContext
from .decoder import Attention, DecoderLayer, FeedForward
from .head_norm import HeadNorm, WidthNorm
from .kernels.cpp import CppKernels, cache_arguments
from .kernels.kernels import Kernels
from .kv_cache import KVCache
from .norm import Norm

_OPERATORS = ("add_and_norm", "gated_silu", "rotate_and_write", "attend_decodes")


class _Stage(Structure):
    """`Stage` of `decoder.cpp`."""

    _fields_ = (
        *((name, c_void_p) for name in (*_OPERATORS, "layers")),
        *((name, c_int64) for name in ("num_layers", "H", "K", "G", "D", "F")),
        *((name, c_int64) for name in ("cache_kind", "cache_head", "block_size")),
        *((name, c_double) for name in ("eps", "head_eps")),
    )


def _words(numbers: Iterable[int | None]) -> Array[c_int64]:
    """Return a struct whose fields are pointers and int64."""
    words = [number or 0 for number in numbers]
    return (c_int64 * len(words))(*words)


class DecodeLayers:
    """The decoder layers of a stage whose weights are packed. `find_decode_layers` checks that C++ supports them.

    Args:
        layers: the stage's layers.
        kinds: one key per layer; layers with equal keys share a `BatchContext`.
        cache: the KV cache of these layers.
        kernels: the C++ operators of these layers.
        groups: the process groups of this rank.
    """

    def __init__(
        self,
        layers: Sequence[DecoderLayer],
        kinds: Sequence[object],
        cache: KVCache,
        kernels: CppKernels,
        groups: Groups,
    ) -> None:
        library = find("decoder", kernels.dtype, decode="ppppi:i")
        assert library is not None
        self._decode, self._dtype, self._groups = library.decode, kernels.dtype, groups
        own = list(dict.fromkeys(kinds))
        self._firsts = [kinds.index(kind) for kind in own]  # the first layer of each
        backends = [_parts(layers[first])[0].backend for first in self._firsts]
        self._windows = [backend.window for backend in backends if isinstance(backend, CppBackend)]
        self._products = [linear.packed for layer in layers for linear in _linears(layer)]
        self._most_rows = min(each.most_rows for each in self._products if isinstance(each, CppProduct))
        of_layers = zip(layers, kinds, cache.keys, cache.values, strict=True)
        self._layers = _words(
            word
            for layer, kind, keys, values in of_layers
            for word in (*_layer_words(layer, groups), *addresses(keys, values), own.index(kind))
        )
        attention, ffn = _parts(layers[0])
        norm, head_norm, (_, K, E, D) = layers[0].attention_norm, attention.qk_norm, attention.shape
        assert isinstance(norm, Norm)
        operators = dict.fromkeys(_OPERATORS, kernels.library) | {"attend_decodes": kernels.attention}
        functions = [cast(getattr(library, name), c_void_p).value for name, library in operators.items()]
        cache_kind, _, _, cache_head = cache_arguments(cache.keys[0], cache.values[0])
        sizes = (len(layers), len(norm.weight), K, E - 2, D, ffn.size // ffn.tp, cache_kind, cache_head)
        eps = norm.eps, 0.0 if head_norm is None else head_norm.eps
        layers_at = cast(self._layers, c_void_p)
        self._stage = _Stage(*functions, layers_at, *sizes, attention.backend.sizes.block_size, *eps)

    def takes(self, rows: int, contexts: Sequence[BatchContext]) -> bool:
        """Return whether `compute` supports a micro-batch of `rows` rows: decodes only, and not too many."""
        plan = contexts[0].plan
        assert isinstance(plan, CppPlan)
        can_sum = self._groups.mesh.tp == 1 or self._groups.shared is not None
        return can_sum and contexts[-1].rows is None and rows == len(plan.decodes) <= self._most_rows

    def compute(self, x_TH: Tensor, contexts: Sequence[BatchContext]) -> Tensor:
        """Run all layers in place, with the same results as layer by layer. `contexts` has one entry per layer."""
        words: list[int | None] = []
        for first, window in zip(self._firsts, self._windows, strict=True):
            context = contexts[first]
            decodes = context.plan.decodes
            at = decodes.starts.ctypes.data, decodes.tables.ctypes.data, decodes.tables.shape[1]
            words += [*addresses(context.slots, *(context.rope or (None, None))), *at, window]
        x_TH, shared = x_TH.contiguous(), self._groups.shared
        ranks = None if shared is None else byref(shared.reduction(self._dtype))
        late = self._decode(byref(self._stage), _words(words), ranks, x_TH.data_ptr(), len(x_TH))
        if shared is not None:
            shared.check(late)
        return x_TH


def find_decode_layers(
    layers: Sequence[DecoderLayer], kinds: Sequence[object], cache: KVCache, kernels: Kernels, groups: Groups
) -> DecodeLayers | None:
    """Return the fused path for decode-only micro-batches; None if a layer has a part that it does not support."""
    if not layers or not isinstance(kernels, CppKernels) or not all(map(_is_plain, layers)):
        return None
    return DecodeLayers(layers, kinds, cache, kernels, groups)


def _is_plain(layer: DecoderLayer) -> bool:
    attention, ffn = layer.attention, layer.ffn
    if layer.is_parallel or layer.attention_norm_after is not None or layer.ffn_norm_after is not None:
        return False
    if layer.attention_norm is None or layer.ffn_norm is None:
        return False
    if not (isinstance(attention, Attention) and isinstance(attention.backend, CppBackend)):
        return False
    if attention.query_factor != 1.0 or attention.factor != 1.0 or isinstance(attention.qk_norm, WidthNorm):
        return False
    if not (isinstance(ffn, FeedForward) and ffn.gated and ffn.activation is F.silu and ffn.factor == 1.0):
        return False
    return all(map(_is_by_cpp, _linears(layer)))


def _is_by_cpp(linear: ColumnParallelLinear | RowParallelLinear) -> bool:
    packed = linear.packed
    return isinstance(packed, CppProduct) and packed.most_rows > 0 and not packed.is_padded


def _parts(layer: DecoderLayer) -> tuple[Attention, FeedForward]:
    attention, ffn = layer.attention, layer.ffn
    assert isinstance(attention, Attention)
    assert isinstance(ffn, FeedForward)
    return attention, ffn


def _linears(layer: DecoderLayer) -> list[ColumnParallelLinear | RowParallelLinear]:
    attention, ffn = _parts(layer)
    return [attention.qkv, attention.out, ffn.fc1, ffn.fc2]


def _layer_words(layer: DecoderLayer, groups: Groups) -> list[int | None]:
    """Return the fields of `Layer` in `decoder.cpp`, up to its KV cache."""
    words: list[int | None] = []
    for linear in _linears(layer):
        packed = linear.packed
        assert isinstance(packed, CppProduct)
        is_added_here = isinstance(linear, ColumnParallelLinear) or groups.mesh.tp_rank == 0
        words += [packed.function, packed.weight, *addresses(linear.bias if is_added_here else None)]
    for norm in (layer.attention_norm, layer.ffn_norm):
        assert isinstance(norm, Norm)
        words += addresses(norm.weight, norm.bias)
    head_norm = _parts(layer)[0].qk_norm
    own = (head_norm.query_weight, head_norm.key_weight) if isinstance(head_norm, HeadNorm) else (None, None)
    return [*words, *addresses(*own)]
