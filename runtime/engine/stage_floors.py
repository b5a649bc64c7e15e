"""Counts the least FLOPs and bytes of each stage per micro-batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ...conf.architecture import Architecture, LayerKind
from ...models.memory import expert_bytes, kv_bytes_per_token, weight_bytes
from ...models.quantization.formats import ModelFormats
from ...parallel.mesh import Mesh
from ..core.stage_floor import AttentionLayers, LastLayer, RowWork, StageFloor, StageMachine


def stage_floors(
    arch: Architecture,
    layers: Sequence[range],
    machines: Sequence[StageMachine],
    *,
    tp: int,
    dtype_bytes: int,
    formats: ModelFormats | None = None,
    cache_dtype: str = "auto",
    last_layer: LastLayer = "sampled",
) -> list[StageFloor]:
    """Return the work of each stage; an empty list if the rates of a machine are unknown.

    FLOPs count linear layers, attention, the LM head, and only the experts that a row is routed to. Bytes count the
    weights, read once per micro-batch, and the KV cache. Activations, norms, the embedding and sampling are left out.
    Routing is assumed to be uniform over the experts.

    Args:
        arch: the whole model's architecture.
        layers: number of layers of each stage.
        machines: rates of one rank, per stage.
        tp: ranks per stage.
        dtype_bytes: per element of unquantized weights.
        formats: the quantized matrices' formats; None: none are quantized.
        cache_dtype: `cache.dtype`.
        last_layer: as in `StageCosts`.
    """
    if not all(machine.is_known for machine in machines):
        return []

    def read(part: range, rank: int) -> int:  # bytes of weights, by all ranks of a stage
        return tp * weight_bytes(arch, Mesh(3, tp, rank), part, dtype_bytes, formats=formats)

    def work(part: range) -> RowWork:  # on a middle stage, without embedding and LM head
        flops = 2.0 * sum(_active_params(arch, arch.kind(layer)) for layer in part)
        experts = expert_bytes(arch, part, dtype_bytes, formats)
        return RowWork(flops, max(0, read(part, tp) - experts), experts)

    value_pairs = arch.head_dim + arch.value_dim if arch.latent is None else arch.latent.query_dim + arch.value_dim
    share = 0.0 if arch.experts is None else arch.experts.experts_per_token / arch.experts.num_experts
    found = []
    for stage, (own, machine) in enumerate(zip(layers, machines, strict=True)):
        rows, sampled, whole = work(own), RowWork(), own
        if stage == len(layers) - 1:
            if last_layer == "sampled":
                whole, last = own[:-1], own[-1:]
                of_last, keys = work(last), _key_params(arch)
                key_bytes = of_last.bytes * keys / _dense_params(arch, arch.kind(own[-1]))
                before = work(whole)
                rows = RowWork(before.flops + 2.0 * keys, before.bytes + key_bytes, before.expert_bytes)
                sampled = RowWork(of_last.flops - 2.0 * keys, of_last.bytes - key_bytes, of_last.expert_bytes)
            head = read(range(0), 2 * tp)
            flops = sampled.flops + 2.0 * arch.embedding_params
            sampled = RowWork(flops, sampled.bytes + head, sampled.expert_bytes)
        of_chunks, of_decodes = (Counter(arch.kind(i).window for i in part) for part in (whole, own))
        found.append(
            StageFloor(
                machine,
                tp,
                rows,
                sampled,
                2.0 * arch.num_heads * value_pairs,
                float(tp * kv_bytes_per_token(arch, 1, tp, dtype_bytes, cache_dtype)),
                [AttentionLayers(window, of_chunks[window], count) for window, count in of_decodes.items()],
                share,
            )
        )
    return found


def _active_params(arch: Architecture, kind: LayerKind) -> int:
    """Return the active parameters of a layer per row, including its top-k experts."""
    picked = arch.experts.experts_per_token if arch.experts is not None and kind.experts else 0
    return _dense_params(arch, kind) + picked * arch.expert_params


def _dense_params(arch: Architecture, kind: LayerKind) -> int:
    """Return the parameters of a layer, without its routed experts."""
    held = arch.experts.num_experts if arch.experts is not None and kind.experts else 0
    return arch.params_of(kind) - held * arch.expert_params


def _key_params(arch: Architecture) -> int:
    """Return the parameters of a layer's KV projections (for MLA, to the compressed KV)."""
    width = arch.latent.cached if arch.latent is not None else 2 * arch.num_kv_heads * arch.head_dim
    return arch.hidden_size * width
