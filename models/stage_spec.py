"""What a rank builds its shard of a stage from; it goes whole from the plan to the rank to the stage."""

from __future__ import annotations

import msgspec

from ..conf.architecture import Architecture
from ..conf.schema import ModelConfig
from .block_groups import ONE_TABLE, Windows


class StageSpec(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A stage as planned.

    Attributes:
        model: what `arch` was read from; its dtype is the stage's once the checkpoint is open.
        layers: half-open range of the model's layers.
        num_blocks: KV blocks of `block_size` tokens each.
        replicate_embedding: each rank of the first stage has the whole embedding.
        whole_experts: each rank has whole experts (expert parallelism), not a shard of each.
        seed: seed of random weights, which are the same on every mesh.
        cache_dtype: dtype of the KV cache; auto: the activations' dtype.
        windows: window of each layer group, each with its own block table (`models/block_groups.py`).
    """

    model: ModelConfig
    arch: Architecture
    layers: tuple[int, int]
    num_blocks: int
    block_size: int
    replicate_embedding: bool = False
    whole_experts: bool = False
    seed: int = 0
    cache_dtype: str = "auto"
    windows: Windows = ONE_TABLE
