"""Builds a rank's shard of a stage and loads its weights."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..conf.architecture import Architecture
from ..conf.schema import ModelConfig
from ..parallel.groups import Groups
from .block_groups import ONE_TABLE, Windows
from .huggingface import resolve_weights
from .memory import resolve_dtype
from .open_checkpoint import open_source
from .quantization.formats import model_formats
from .stage import Stage
from .weights import load_stage


def build_stage(
    model: ModelConfig,
    arch: Architecture,
    groups: Groups,
    layers: range,
    *,
    num_blocks: int,
    block_size: int,
    replicate_embedding: bool = False,
    whole_experts: bool = False,
    seed: int = 0,
    cache_dtype: str = "auto",
    windows: Windows = ONE_TABLE,
    on_piece: Callable[[], None] = lambda: None,
) -> Stage:
    """Build this rank's slice of the stage that holds `layers`, allocate its KV cache and load its weights.

    `arch` is `resolve_architecture(model)`. With `weights=random`, a `seed` gives the same weights on every mesh.
    `windows` are as of `Stage`. `on_piece` is called before each piece of the weights is loaded.

    Raises:
        ConfigError: a tensor is missing or has the wrong shape, or the attention backend does not run here.
    """
    dtype = getattr(torch, resolve_dtype(model, groups.device.type))
    source = open_source(resolve_weights(model), arch, seed, model.quantization)
    stage = Stage(
        arch,
        groups,
        layers,
        dtype=dtype,
        attention=model.attention,
        num_blocks=num_blocks,
        block_size=block_size,
        replicate_embedding=replicate_embedding,
        kernels=model.kernels,
        whole_experts=whole_experts,
        formats=model_formats(source.format, arch, groups.mesh.tp, groups.device.type, whole_experts=whole_experts),
        cache_dtype=cache_dtype,
        windows=windows,
    )
    load_stage(stage, source, on_piece)
    return stage
