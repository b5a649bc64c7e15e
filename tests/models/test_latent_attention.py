"""Latent attention: what attends to latents gives what attends to the keys and values that are made of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from gapless.conf.architecture import Architecture
from gapless.conf.errors import ConfigError
from gapless.conf.latent import LatentConfig
from gapless.conf.schema import ModelConfig
from gapless.models.attention import latent as module
from gapless.models.batch import RaggedBatch, Segment
from gapless.models.memory import kv_bytes_per_token, weight_bytes
from gapless.models.stage import Stage
from gapless.models.stage_spec import StageSpec
from gapless.parallel.groups import Groups
from gapless.parallel.mesh import Mesh
from gapless.parallel.rendezvous import Rendezvous

LATENT = LatentConfig(rank=24, query_rank=20, head_dim=12, rotary_dim=8, value_dim=10)
ARCH = Architecture(
    vocab_size=56,
    hidden_size=32,
    num_layers=1,
    num_heads=4,
    num_kv_heads=1,
    head_dim=32,
    ffn_size=48,
    max_position=128,
    family="deepseek",
    latent=LATENT,
)


def _spec(num_blocks: int, kernels: Any = "auto") -> StageSpec:
    model = ModelConfig(architecture=ARCH, dtype="float32", kernels=kernels)
    return StageSpec(model=model, arch=ARCH, layers=(0, 1), num_blocks=num_blocks, block_size=4)


def _outputs(expand: bool, kernels: str, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """Return the logits of two chunks and two decodes, one micro-batch after another."""
    monkeypatch.setattr(module, "expands", lambda latent, chunk: expand)
    torch.manual_seed(0)
    with Groups.start(Rendezvous(0, 1, "", "cpu"), Mesh(1, 1), 60) as groups:
        stage = Stage(_spec(24, kernels), groups)
        for parameter in stage.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        tables = [np.array([5, 2, 9, 0, 7]), np.array([1, 3, 4, 6, 8])]
        found = []
        for batch in (
            RaggedBatch.of(list(range(11)), [Segment(0, 11, tables[0])], [], [10]),
            RaggedBatch.of(
                [3, 1, 4, 1, 5, 9, 2],
                [Segment(11, 3, tables[0]), Segment(0, 4, tables[1])],
                [],
                [2, 6],
            ),
            RaggedBatch.of([7, 8], [], [Segment(14, 1, tables[0]), Segment(4, 1, tables[1])], [0, 1]),
            RaggedBatch.of([6, 6, 8], [Segment(15, 2, tables[0])], [Segment(5, 1, tables[1])], [1, 2]),
        ):
            found.append(stage(stage.prepare(batch)))
    return torch.cat(found)


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_both_ways_give_the_same(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expanded = _outputs(True, kernels, monkeypatch)
    torch.testing.assert_close(_outputs(False, kernels, monkeypatch), expanded, atol=1e-4, rtol=1e-4)


def test_chunks_are_expanded_where_that_takes_fewer_products() -> None:
    v3 = LatentConfig(rank=512, query_rank=1536, head_dim=128, rotary_dim=64, value_dim=128)
    assert module.expands(v3, Segment(0, 512, []))
    assert module.expands(v3, Segment(4096, 512, []))
    assert not module.expands(v3, Segment(4096, 32, []))
    assert not module.expands(v3, Segment(4096, 1, []))


def test_the_cache_holds_the_latent_and_the_rotated_key_alone() -> None:
    assert kv_bytes_per_token(ARCH, 3, 1, 2) == kv_bytes_per_token(ARCH, 3, 4, 2) == 3 * (24 + 8) * 2
    with Groups.start(Rendezvous(0, 1, "", "cpu"), Mesh(1, 1), 60) as groups:
        stage = Stage(_spec(3), groups)
        assert {tensor.data_ptr() for tensor in stage.cache.keys} == {t.data_ptr() for t in stage.cache.values}
        assert stage.cache.keys[0].numel() * 4 == (3 + 1) * 4 * kv_bytes_per_token(ARCH, 1, 1, 4)
        held = sum(p.numel() * p.element_size() for p in stage.parameters())
        assert held == pytest.approx(weight_bytes(ARCH, Mesh(1, 1), range(1), 4), rel=0.02)  # norms are left out


def test_sizes_that_do_not_fit_are_refused_by_key() -> None:
    with pytest.raises(ConfigError, match=r"architecture.head_dim=64: must be latent.rank \+ latent.rotary_dim = 32"):
        replace(ARCH, head_dim=64)
    with pytest.raises(ConfigError, match=r"latent.rotary_dim=7: must be even"):
        replace(LATENT, rotary_dim=7)
