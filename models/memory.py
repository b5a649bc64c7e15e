"""The memory model: bytes of a rank's weights, bytes of a token's keys and values, and how many tokens fit.

A real run on CUDA also reserves work memory (`models/work_memory.py`), which reduces the KV cache.

The paper's formula (4.3.1) is B = floor((M_G - M_S) / (L * m_kv)). M_G is the memory that a rank may use, M_S the
memory of its weights, L the length of the longest sequence, and m_kv the memory of one token's keys and values. Stages
with fewer layers fit more sequences, so B is the minimum over the stages.

This file imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..conf.architecture import Architecture, LayerKind
from ..conf.errors import ConfigError
from ..conf.schema import HardwareConfig, ParallelConfig
from ..kernels.weight_format import WeightFormat
from ..parallel.mesh import Mesh
from ..parallel.split import split_layers
from .block_groups import ONE_TABLE, Windows, blocks_held, layers_of_a_block
from .quantization.formats import LayerFormats, ModelFormats, plain_formats
from .work_memory import graph_bytes, sampler_bytes

_GIB = 1 << 30
_MAX_REPLICA_SHARE = 0.02  # of a rank's memory, for the rest of the embedding
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def kv_row_width(head_dim: int, cache_dtype: str) -> int:
    """Return the elements of a head's key or value in the cache; 8-bit rows include a 4-byte scale."""
    return head_dim if cache_dtype == "auto" else -(-head_dim // 4) * 4 + 4


def kv_row_bytes(head_dim: int, dtype_bytes: int, cache_dtype: str) -> int:
    """Return the bytes of a head's key or value in the cache."""
    return kv_row_width(head_dim, cache_dtype) * (dtype_bytes if cache_dtype == "auto" else 1)


def kv_bytes_per_token(
    arch: Architecture, num_layers: int, tp: int, dtype_bytes: int, cache_dtype: str = "auto"
) -> int:
    """Return m_kv: the bytes of one token's keys and values on one rank of a stage with `num_layers` layers.

    `dtype_bytes` is the size of the model's elements, `cache_dtype` is `cache.dtype`. With MLA each rank caches the
    whole compressed KV and nothing else.
    """
    if arch.latent is not None:
        return num_layers * kv_row_bytes(arch.latent.cached, dtype_bytes, cache_dtype)
    return 2 * num_layers * max(1, arch.num_kv_heads // tp) * kv_row_bytes(arch.head_dim, dtype_bytes, cache_dtype)


def weight_bytes(
    arch: Architecture,
    mesh: Mesh,
    layers: range,
    dtype_bytes: int,
    *,
    replicate_embedding: bool = False,
    formats: ModelFormats | None = None,
) -> int:
    """Return M_S: the bytes of the weights of the rank `mesh.rank`, whose stage has `layers`.

    `formats`: formats of quantized matrices; None: there are none.

    Tied embeddings count on the first and on the last stage, but only once if there is one stage. Expert parameters per
    rank are the same with shards of every expert as with whole experts. Routers and MLA down-projections are
    replicated, and KV heads if there are fewer of them than ranks.
    """
    formats = formats or plain_formats(arch)
    total = sum(_layer_bytes(arch, arch.kind(i), mesh.tp, formats.layers[i], dtype_bytes) for i in layers)
    embedding = -(-arch.embedding_params // mesh.tp)
    if mesh.is_first:
        held = arch.embedding_params if replicate_embedding else embedding
        total += _held_bytes(held, formats.embedding, dtype_bytes)
        if arch.position == "learned":
            total += arch.max_position * arch.hidden_size * dtype_bytes
    if mesh.is_last and not (mesh.is_first and arch.tie_embeddings):
        total += _held_bytes(embedding, formats.head, dtype_bytes)
    return total


def expert_bytes(arch: Architecture, layers: range, dtype_bytes: int, formats: ModelFormats | None = None) -> int:
    """Return the bytes of all routed experts of `layers`, over all ranks; 0 without experts."""
    if arch.experts is None:
        return 0
    formats, total = formats or plain_formats(arch), 0
    for layer in layers:
        if arch.kind(layer).experts:
            elements, own = arch.experts.num_experts * arch.expert_params, formats.layers[layer]
            total += _held_bytes(elements - elements // 3, own.fc1, dtype_bytes)
            total += _held_bytes(elements // 3, own.fc2, dtype_bytes)
    return total


def _layer_bytes(arch: Architecture, kind: LayerKind, tp: int, formats: LayerFormats, dtype_bytes: int) -> int:
    """Return the bytes of a rank's shard of a decoder layer of a kind."""
    H, K, whole = arch.hidden_size, arch.num_kv_heads, arch.replicated_attention_params
    router = arch.router_params_of(kind)
    out = H * arch.value_dim * arch.num_heads
    copied = 0 if arch.latent is not None else 2 * H * arch.head_dim * (max(K, tp) - K)  # over all ranks
    qkv = arch.attention_params - whole - out + copied
    shared = 3 * H * arch.experts.shared_ffn_size if arch.experts is not None and kind.experts else 0
    ffn = arch.params_of(kind) - router - arch.attention_params - shared
    down = ffn // (3 if arch.gated_ffn else 2)
    parts = (
        *((qkv, formats.qkv), (out, formats.out), (ffn - down, formats.fc1), (down, formats.fc2)),
        *((shared - shared // 3, formats.shared_fc1), (shared // 3, formats.shared_fc2)),
    )
    sliced = sum(_held_bytes(elements, format, dtype_bytes) for elements, format in parts)
    return -(-sliced // tp) + (router + whole) * dtype_bytes


def _held_bytes(elements: int, format: WeightFormat | None, dtype_bytes: int) -> int:
    return elements * dtype_bytes if format is None else math.ceil(elements * format.bytes_per_element)


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """The memory of the ranks of a pipeline.

    Attributes:
        arch: the whole model's architecture.
        parallel: the grid of ranks, and the split of the layers.
        stages: the hardware of each stage's ranks.
        dtype_bytes: per element of unquantized weights, and of the KV cache if `cache_dtype` is auto.
        max_rows: the maximum number of rows sampled at once; 0: no work memory is counted, as on a CPU.
        formats: the quantized matrices' formats; None: there are none.
        cache_dtype: `cache.dtype`.
        windows: attention windows of the layer groups, each with its own block table.
    """

    arch: Architecture
    parallel: ParallelConfig
    stages: Sequence[HardwareConfig]
    dtype_bytes: int
    max_rows: int = 0
    formats: ModelFormats | None = None
    cache_dtype: str = "auto"
    windows: Windows = ONE_TABLE

    def slots(self) -> int:
        """Return the paper's B: how many sequences of `arch.max_position` tokens fit into the KV cache at once.

        The paper counts no work memory.

        Raises:
            ConfigError: the weights do not fit, or no sequence fits alongside them.
        """
        return replace(self, max_rows=0)._fit(blocks_held(self.arch.max_position, self.windows, 1))

    def blocks(self, block_size: int) -> int:
        """Return how many KV blocks of `block_size` tokens fit.

        Raises:
            ConfigError: the weights do not fit, or no sequence of `arch.max_position` tokens fits alongside them.
        """
        self._fit(blocks_held(self.arch.max_position, self.windows, block_size) * block_size)
        return self._fit(block_size)

    def check_blocks(self, block_size: int, num_blocks: int) -> None:
        """Check that the `num_blocks` KV blocks of the config fit.

        Raises:
            ConfigError: the weights do not fit, or the blocks do not fit alongside them.
        """
        self._fit(num_blocks * block_size, f"{num_blocks} KV blocks of {block_size} tokens", "cache.num_blocks")

    def most_layers(self, num_tokens: int) -> list[int]:
        """Return how many layers fit into each stage, including their keys and values for `num_tokens` tokens."""
        found = []
        for stage, own in enumerate(self.stages):
            fixed, with_one = (self._fixed(stage, range(count)) for count in (0, 1))
            one = with_one - fixed + num_tokens * self._kv_bytes_per_token(1)
            found.append(max(0, _available(own) - fixed) // one)
        return found

    def replicates_embedding(self, stage: int = 0) -> bool:
        """Return whether the first stage's embedding is replicated on each rank, on `stage`'s hardware, not sharded.

        Never with one stage, or one rank per stage. Otherwise `parallel.replicate_embedding` decides. If that is null,
        the embedding is replicated if this takes at most 2% more of each rank's memory.
        """
        parallel = self.parallel
        if parallel.pp == 1 or parallel.tp == 1:
            return False
        if parallel.replicate_embedding is not None:
            return parallel.replicate_embedding
        format = self.formats.embedding if self.formats else None
        rest_bytes = _held_bytes(self.arch.embedding_params, format, self.dtype_bytes) * (parallel.tp - 1) / parallel.tp
        return rest_bytes <= _MAX_REPLICA_SHARE * self.stages[stage].memory_gib * _GIB

    def _weights(self, stage: int, layers: range) -> int:
        pp, tp, whole = self.parallel.pp, self.parallel.tp, self.replicates_embedding(stage)
        mesh = Mesh(pp, tp, stage * tp)
        return weight_bytes(self.arch, mesh, layers, self.dtype_bytes, replicate_embedding=whole, formats=self.formats)

    def _fixed(self, stage: int, layers: range) -> int:
        """Return the bytes of a rank's weights and work memory."""
        if not self.max_rows:
            return self._weights(stage, layers)
        work = graph_bytes(self.arch, self.parallel.tp, self.dtype_bytes)
        if stage == self.parallel.pp - 1:
            work += sampler_bytes(self.arch.vocab_size, -(-self.max_rows // self.parallel.tp))
        return self._weights(stage, layers) + work

    def _kv_bytes_per_token(self, num_layers: int) -> int:
        return kv_bytes_per_token(self.arch, num_layers, self.parallel.tp, self.dtype_bytes, self.cache_dtype)

    def _fit(self, num_tokens: int, content: str = "", key_to_lower: str = "model.max_model_len") -> int:
        """Return how many times the blocks of `num_tokens` tokens fit on the fullest stage.

        The error describes the tokens as `content`, and names `key_to_lower`, the config key that reduces them.

        Raises:
            ConfigError: they do not fit even once.
        """
        fits = []
        split = split_layers(self.arch, self.parallel.pp, self.parallel.layer_counts(self.arch.num_layers))
        for stage, (layers, own) in enumerate(zip(split, self.stages, strict=True)):
            available, fixed = _available(own), self._fixed(stage, layers)
            unit = num_tokens * self._kv_bytes_per_token(layers_of_a_block(self.arch, layers, self.windows))
            if fixed + unit > available:
                key = f"hardware.memory_gib={own.memory_gib:g}{'' if own is self.stages[0] else f' of {own.name}'}"
                fixed_content = "weights and work memory" if self.max_rows else "weights"
                if fixed > available:
                    raise ConfigError(
                        f"{key}: the {fixed_content} of stage {stage} alone take {fixed / _GIB:.3g} GiB per rank; "
                        "raise it, parallel.pp or parallel.tp"
                    )
                raise ConfigError(
                    f"{key}: stage {stage} needs {(fixed + unit) / _GIB:.3g} GiB per rank for its {fixed_content} and "
                    f"{content or f'one sequence of {self.arch.max_position} tokens'}; raise it, parallel.pp or "
                    f"parallel.tp, or lower {key_to_lower}"
                )
            fits.append((available - fixed) // unit)
        return min(fits)


def _available(hardware: HardwareConfig) -> int:
    return int(hardware.memory_gib * _GIB)
