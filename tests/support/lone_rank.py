"""Stages of small models, each alone in its process, and micro-batches of every kind for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from gapless.conf.architecture import Architecture, LayerKind
from gapless.conf.schema import ModelConfig
from gapless.models.batch import RaggedBatch, Segment
from gapless.models.stage import Stage
from gapless.models.stage_spec import StageSpec
from gapless.parallel.groups import Groups
from gapless.parallel.mesh import Mesh
from gapless.parallel.split import split_layers

LLAMA = Architecture(
    vocab_size=61,
    hidden_size=32,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn_size=48,
    max_position=64,
)
ARCHITECTURES = {
    "gpt2": dataclasses.replace(
        LLAMA,
        num_kv_heads=4,
        norm="layer",
        position="learned",
        activation="gelu_tanh",
        gated_ffn=False,
        qkv_bias=True,
        attention_out_bias=True,
        ffn_bias=True,
        tie_embeddings=True,
    ),
    "llama": LLAMA,
    "mistral": dataclasses.replace(LLAMA, sliding_window=6),
    "qwen3": dataclasses.replace(LLAMA, qk_norm=True),
}
MIXED = {  # layers that differ, and norms that stand elsewhere
    "windows": dataclasses.replace(
        LLAMA,
        norms="both",
        qk_norm=True,
        attention_scale=0.5,
        embedding_scale=4.0,
        residual_scale=0.5,
        logit_scale=0.5,
        logit_softcap=5.0,
        activation="gelu_tanh",
        layers=(LayerKind(window=6), LayerKind(rope_theta=100.0), LayerKind(window=6, rope=False)),
    ),
    "after": dataclasses.replace(LLAMA, norms="after", qk_norm=True, qk_norm_over="width", rotary_dim=4),
    "parallel": dataclasses.replace(LLAMA, norm="layer", norms="parallel", gated_ffn=False, ffn_bias=True),
    "shared": dataclasses.replace(LLAMA, norm="layer", norms="shared", qkv_bias=True),
}

CHUNK, MIDDLE = Segment(0, 5, [3, 1]), Segment(5, 4, [0, 2, 5])
DECODES = [Segment(9, 1, [4, 6, 7]), Segment(3, 1, [8])]
BATCHES = {
    "first chunk": RaggedBatch.of([1] * 5, [CHUNK], [], []),
    "chunks": RaggedBatch.of([1] * 9, [MIDDLE, CHUNK], [], [8]),
    "one decode": RaggedBatch.of([1], [], DECODES[:1], [0]),
    "decodes": RaggedBatch.of([1] * 2, [], DECODES, [0, 1]),
    "mixed": RaggedBatch.of([1] * 6, [MIDDLE], DECODES, [4, 5]),
    "a draft": RaggedBatch.of([1] * 7, [CHUNK], DECODES, [2, 3, 4, 5, 6]),
}


class OneRank:
    """The size of a process group of which this process is the only rank here."""

    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


class LoneGroups(Groups):
    """The groups of one rank whose peers are absent: a sum is the own share, a gather the own share again."""

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        group = cast(dist.ProcessGroup, OneRank(mesh.tp, mesh.tp_rank))
        super().__init__(mesh, device, group, group, owned=False)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        assert x.is_contiguous()
        return x

    def all_gather(self, x_RV: torch.Tensor) -> torch.Tensor:
        return torch.cat([x_RV] * self.mesh.tp, dim=1)

    def deal_rows(self, x_RV: torch.Tensor) -> torch.Tensor:
        share = self.mesh.share_of(len(x_RV))
        return self.all_gather(x_RV)[share.start : share.stop]


def stage_specs(
    model: ModelConfig, layers: Sequence[tuple[int, int]], num_blocks: int, block_size: int
) -> list[StageSpec]:
    """Return the stages of a model with random weights, in float32 where its dtype is `auto`."""
    assert model.architecture is not None
    if model.dtype == "auto":
        model = dataclasses.replace(model, dtype="float32")
    return [
        StageSpec(model=model, arch=model.architecture, layers=each, num_blocks=num_blocks, block_size=block_size)
        for each in layers
    ]


def lone_stage(
    arch: Architecture,
    mesh: Mesh,
    device: torch.device,
    dtype: torch.dtype,
    num_blocks: int,
    *,
    attention: Any = "sdpa",
    kernels: Any = "auto",
    block_size: int = 4,
    cache_dtype: str = "auto",
) -> Stage:
    """Make a stage. Its memory is not initialized."""
    layers = split_layers(arch, mesh.pp, None)[mesh.stage]
    name: Any = str(dtype).removeprefix("torch.")
    spec = StageSpec(
        model=ModelConfig(architecture=arch, dtype=name, attention=attention, kernels=kernels),
        arch=arch,
        layers=(layers.start, layers.stop),
        num_blocks=num_blocks,
        block_size=block_size,
        cache_dtype=cache_dtype,
    )
    return Stage(spec, LoneGroups(mesh, device))
