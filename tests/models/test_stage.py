"""The stage: its last layer, which computes only what is sampled, and tokens that lie on its device."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from gapless.conf.architecture import Architecture
from gapless.conf.schema import ModelConfig
from gapless.models.batch import RaggedBatch, Segment
from gapless.models.build_stage import build_stage
from gapless.models.ranking import NO_TOKEN
from gapless.models.stage_spec import StageSpec
from gapless.parallel.groups import Groups
from gapless.parallel.mesh import Mesh
from gapless.parallel.rendezvous import Rendezvous

ARCH = Architecture(
    vocab_size=64,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn_size=64,
    max_position=16,
)
SPEC = StageSpec(model=ModelConfig(architecture=ARCH), arch=ARCH, layers=(0, 2), num_blocks=4, block_size=4, seed=3)


def test_tokens_are_taken_from_the_device() -> None:
    """One that is none, where logits were not finite, is read as another that the embedding has."""
    batch = RaggedBatch.of([5, 6, -2, 7, -1], [Segment(0, 2, [0])], [Segment(3, 1, [n]) for n in (1, 2, 3)], [2, 3, 4])
    with Groups.start(Rendezvous(0, 1, "", "cpu"), Mesh(1, 1), 60) as groups:
        stage = build_stage(SPEC, groups)
        for sampled, expected in (([8, 9], [5, 6, 9, 7, 8]), ([NO_TOKEN, 9], [5, 6, 9, 7, 0])):
            inputs = stage.prepare(batch, torch.tensor(sampled))
            assert inputs.token_ids is not None
            assert inputs.token_ids.tolist() == expected


def test_the_last_layer_of_sampled_rows_alone_gives_their_logits() -> None:
    """The logits of sampled rows are those of the same rows where all rows are sampled, and the cache is the same."""
    batch = RaggedBatch.of(
        [5, 6, 7, 8, 9, 1, 2, 3, 4], [Segment(0, 5, [0, 1]), Segment(0, 3, [2])], [Segment(0, 1, [3])], [7, 8]
    )
    with Groups.start(Rendezvous(0, 1, "", "cpu"), Mesh(1, 1), 60) as groups:
        stages = [build_stage(SPEC, groups) for _ in range(3)]
        some = stages[0](stages[0].prepare(batch))
        whole = stages[1](stages[1].prepare(dataclasses.replace(batch, sample_rows=np.arange(9))))
        none = stages[2](stages[2].prepare(dataclasses.replace(batch, sample_rows=np.arange(0))))
    torch.testing.assert_close(some, whole[[7, 8]], rtol=1e-5, atol=1e-6)
    assert none.shape == (0, ARCH.vocab_size)
    for stage in stages[1:]:
        for layer in range(2):
            written = [0, 1, 2, 3, 4, 8, 9, 10, 12]
            torch.testing.assert_close(stage.cache.keys[layer][written], stages[0].cache.keys[layer][written])
            torch.testing.assert_close(stage.cache.values[layer][written], stages[0].cache.values[layer][written])
