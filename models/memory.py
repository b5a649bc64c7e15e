"""The memory model: what a rank's weights and a token's keys and values take, and how many fit. No torch.

The paper's formula (4.3.1) is B = floor((M_G - M_S) / (L * m_kv)): M_G what a rank may use, M_S its weights, L the
longest sequence, m_kv the keys and values of one token. A stage with few layers has room for more, so the minimum
over the stages counts. `hardware` below is that of all ranks, or of each stage's where nodes differ.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..conf.errors import ConfigError
from ..conf.schema import Architecture, HardwareConfig, ModelConfig, ParallelConfig
from ..parallel.mesh import Mesh
from ..parallel.split import split_layers

Hardware = HardwareConfig | Sequence[HardwareConfig]

_GIB = 1 << 30
_LITTLE = 0.02  # of a rank's memory
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def resolve_dtype(model: ModelConfig, device: str) -> str:
    """`float32`, `bfloat16` or `float16`; `auto` is float32 on a CPU and bfloat16 on CUDA."""
    if model.dtype != "auto":
        return model.dtype
    return "bfloat16" if device.startswith("cuda") else "float32"


def dtype_bytes(model: ModelConfig, device: str) -> int:
    """Bytes of one element of the weights and the cache."""
    return _BYTES[resolve_dtype(model, device)]


def kv_bytes_per_token(arch: Architecture, num_layers: int, tp: int, dtype_bytes: int) -> int:
    """m_kv: bytes of one token's keys and values on one rank of a stage with `num_layers` layers."""
    return 2 * num_layers * (arch.num_kv_heads // tp) * arch.head_dim * dtype_bytes


def replicates_embedding(
    arch: Architecture, parallel: ParallelConfig, hardware: HardwareConfig, dtype_bytes: int
) -> bool:
    """Whether each rank of the first of several stages, on `hardware`, holds the whole embedding: as told, else where
    what it holds more than a slice is at most 2% of its memory."""
    if parallel.pp == 1 or parallel.tp == 1:
        return False
    if parallel.replicate_embedding is not None:
        return parallel.replicate_embedding
    more = arch.embedding_params * dtype_bytes * (parallel.tp - 1) / parallel.tp
    return more <= _LITTLE * hardware.memory_gib * _GIB


def weight_bytes(
    arch: Architecture, mesh: Mesh, layers: range, dtype_bytes: int, *, replicate_embedding: bool = False
) -> int:
    """M_S: bytes of the weights of the rank `mesh.rank`, whose stage holds `layers`.

    Tied embeddings lie on the first and on the last stage, once where these are the same.
    """
    elements = -(-len(layers) * arch.layer_params // mesh.tp)
    embedding = -(-arch.embedding_params // mesh.tp)
    if mesh.is_first:
        elements += arch.embedding_params if replicate_embedding else embedding
        if arch.position == "learned":
            elements += arch.max_position * arch.hidden_size
    if mesh.is_last and not (mesh.is_first and arch.tie_embeddings):
        elements += embedding
    return elements * dtype_bytes


def slot_bound(
    arch: Architecture, parallel: ParallelConfig, hardware: Hardware, dtype_bytes: int
) -> int:
    """B of the paper: sequences of `arch.max_position` tokens whose keys and values fit at once.

    Raises:
        ConfigError: the weights do not fit, or not one sequence.
    """
    return _fit(arch, parallel, hardware, arch.max_position, dtype_bytes)


def block_count(
    arch: Architecture, parallel: ParallelConfig, hardware: Hardware, block_size: int, dtype_bytes: int
) -> int:
    """KV blocks of `block_size` tokens that fit.

    Raises:
        ConfigError: the weights do not fit, or not one sequence of `arch.max_position` tokens.
    """
    _fit(arch, parallel, hardware, -(-arch.max_position // block_size) * block_size, dtype_bytes)
    return _fit(arch, parallel, hardware, block_size, dtype_bytes)


def check_blocks(
    arch: Architecture, parallel: ParallelConfig, hardware: Hardware, block_size: int, num_blocks: int,
    dtype_bytes: int,
) -> None:
    """Whether the `num_blocks` KV blocks that a user asks for fit.

    Raises:
        ConfigError: the weights do not fit, or not so many blocks beside them.
    """
    holding, smaller = f"{num_blocks} KV blocks of {block_size} tokens", "cache.num_blocks"
    _fit(arch, parallel, hardware, num_blocks * block_size, dtype_bytes, holding, smaller)


def _fit(
    arch: Architecture, parallel: ParallelConfig, hardware: Hardware, tokens: int, dtype_bytes: int,
    holding: str = "", smaller: str = "model.max_model_len",
) -> int:
    """How often `tokens` tokens' keys and values fit beside the weights: the minimum over the stages."""
    each = [hardware] * parallel.pp if isinstance(hardware, HardwareConfig) else hardware
    fits = []
    for stage, (layers, own) in enumerate(zip(split_layers(arch, parallel.pp, parallel.layers), each, strict=True)):
        available = int(own.memory_gib * _GIB)
        mesh = Mesh(parallel.pp, parallel.tp, stage * parallel.tp)
        whole = replicates_embedding(arch, parallel, own, dtype_bytes)
        weights = weight_bytes(arch, mesh, layers, dtype_bytes, replicate_embedding=whole)
        unit = tokens * kv_bytes_per_token(arch, len(layers), parallel.tp, dtype_bytes)
        if weights + unit > available:
            key = f"hardware.memory_gib={own.memory_gib:g}{'' if own is each[0] else f' of {own.name}'}"
            if weights > available:
                raise ConfigError(
                    f"{key}: the weights of stage {stage} alone take {weights / _GIB:.3g} GiB a rank; raise it, "
                    "parallel.pp or parallel.tp"
                )
            raise ConfigError(
                f"{key}: stage {stage} needs {(weights + unit) / _GIB:.3g} GiB a rank for its weights and "
                f"{holding or f'one sequence of {arch.max_position} tokens'}; raise it, parallel.pp or parallel.tp, "
                f"or lower {smaller}"
            )
        fits.append((available - weights) // unit)
    return min(fits)
