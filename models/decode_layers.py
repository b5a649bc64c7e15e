"""Runs decode-only micro-batches through all layers of a stage in one C++ call (`decoder.cpp`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from ..kernels.cpp_product import CppProduct
from ..kernels.decoder import DecoderWeights, StageDecoder, decode_tables
from ..kernels.operators.base import Kernels
from ..kernels.operators.cpp import CppKernels
from ..parallel.groups import Groups
from ..parallel.layers import ColumnParallelLinear, RowParallelLinear
from .attention.cpp import CppBackend, CppPlan
from .batch_context import BatchContext
from .decoder import Attention, DecoderLayer, FeedForward
from .kv_cache import KVCache
from .norm import Norm
from .width_norm import WidthNorm


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
        self._dtype, self._groups = kernels.dtype, groups
        own = list(dict.fromkeys(kinds))
        self._firsts = [kinds.index(kind) for kind in own]  # first layer of each kind
        backends = [_parts(layers[first])[0].backend for first in self._firsts]
        self._windows = [backend.window for backend in backends if isinstance(backend, CppBackend)]
        caches = zip(cache.keys, cache.values, strict=True)
        weights = [
            _weights(layer, groups, of_layer, own.index(kind))
            for layer, kind, of_layer in zip(layers, kinds, caches, strict=True)
        ]
        self._most_rows = min(product.most_rows for layer in weights for product, _ in layer.products)
        attention, ffn = _parts(layers[0])
        norm, head_norm, (_, K, E, D) = layers[0].attention_norm, attention.qk_norm, attention.shape
        assert isinstance(norm, Norm)
        self._decode = StageDecoder(
            kernels,
            weights,
            H=len(norm.weight),
            K=K,
            G=E - 2,
            D=D,
            F=ffn.size // ffn.tp,
            block_size=attention.backend.sizes.block_size,
            eps=norm.eps,
            head_eps=0.0 if head_norm is None else head_norm.eps,
        )

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
            words += decode_tables(context.slots, context.rope, decodes.starts, decodes.tables, window)
        x_TH, shared = x_TH.contiguous(), self._groups.shared
        late = self._decode(x_TH, words, None if shared is None else shared.reduction(self._dtype))
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
    return isinstance(packed, CppProduct) and packed.most_rows > 0


def _parts(layer: DecoderLayer) -> tuple[Attention, FeedForward]:
    attention, ffn = layer.attention, layer.ffn
    assert isinstance(attention, Attention)
    assert isinstance(ffn, FeedForward)
    return attention, ffn


def _linears(layer: DecoderLayer) -> list[ColumnParallelLinear | RowParallelLinear]:
    attention, ffn = _parts(layer)
    return [attention.qkv, attention.out, ffn.fc1, ffn.fc2]


def _weights(layer: DecoderLayer, groups: Groups, cache: tuple[Tensor, Tensor], tables: int) -> DecoderWeights:
    products, norms = list[tuple[CppProduct, Tensor | None]](), list[tuple[Tensor, Tensor | None]]()
    for linear in _linears(layer):
        assert isinstance(linear.packed, CppProduct)
        is_added_here = isinstance(linear, ColumnParallelLinear) or groups.mesh.tp_rank == 0
        products.append((linear.packed, linear.bias if is_added_here else None))
    for norm in (layer.attention_norm, layer.ffn_norm):
        assert isinstance(norm, Norm)
        norms.append((norm.weight, norm.bias))
    head_norm = _parts(layer)[0].qk_norm
    assert not isinstance(head_norm, WidthNorm)
    return DecoderWeights(products, norms, head_norm, cache, tables)
