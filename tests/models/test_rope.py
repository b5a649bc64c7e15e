"""Rotary positions of any length are those that are computed anew."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from gapless.conf.architecture import LayerKind
from gapless.kernels.operators.base import rotate
from gapless.models.model_config import ModelValues
from gapless.models.rope import RotaryEmbedding, inverse_frequencies
from gapless.models.rotary_config import RopeKeys, read_rope
from tests.support.lone_rank import LLAMA

CPU = torch.device("cpu")


@pytest.mark.parametrize("positions", [[0, 1, 2047], [2047, 2048], [2048], [4095, 4096, 3], [9000]])
def test_the_table_grows_to_the_positions_that_come(positions: list[int]) -> None:
    arch = dataclasses.replace(LLAMA, max_position=10_000)
    rope = RotaryEmbedding(arch, arch.kind(0), dtype=torch.float32, device=CPU)
    for wanted in ([5], positions, [0]):
        cos, sin = rope.at(torch.tensor(wanted), max(wanted) + 1)
        angles = torch.tensor(wanted, dtype=torch.float32)[:, None] * inverse_frequencies(arch.kind(0), arch.turned)
        torch.testing.assert_close(cos[:, 0, 0], angles.cos())
        torch.testing.assert_close(sin[:, 0, 0], angles.sin())


def test_a_product_of_two_rotated_heads_depends_on_their_distance_alone() -> None:
    rope = RotaryEmbedding(LLAMA, LLAMA.kind(0), dtype=torch.float32, device=CPU)
    query, key = torch.randn(2, LLAMA.head_dim)

    def product(at: int, of: int) -> torch.Tensor:
        rotated = [rotate(x.view(1, 1, 1, -1), *rope.at(torch.tensor([p]), p + 1)) for x, p in ((query, at), (key, of))]
        return (rotated[0] * rotated[1]).sum()

    torch.testing.assert_close(product(7, 3), product(54, 50))
    torch.testing.assert_close(product(9, 9), query @ key)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"beta_fast": 8.0, "beta_slow": 2.0, "truncate": False},
        {"attention_factor": 1.25},
        {"mscale": 0.7, "mscale_all_dim": 1.2},
        {"mscale": 0.7},
        {"factor": 0.5},
    ],
)
def test_yarn_is_that_of_transformers(more: dict[str, Any]) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "rope_theta": 1e6} | more
    config = transformers.LlamaConfig(hidden_size=256, num_attention_heads=2, rope_parameters=dict(rope))
    frequencies, scale = ROPE_INIT_FUNCTIONS["yarn"](config, CPU)
    values = ModelValues(Path("config.json"), {"rope_parameters": rope})
    found = read_rope(values, RopeKeys(), max_position=2048)
    theta, scaling = found.theta, found.scaling
    assert scaling is not None
    assert scaling.attention_factor == pytest.approx(scale, rel=1e-12)
    arch = dataclasses.replace(LLAMA, head_dim=128, rope_theta=theta, rope_scaling=scaling)
    assert torch.equal(inverse_frequencies(arch.kind(0), arch.turned), frequencies)


@pytest.mark.parametrize("longest", [32, 33])
@pytest.mark.parametrize("more", [{}, {"factor": 3.0}, {"attention_factor": 1.25}, {"factor": 0.5}])
def test_longrope_is_that_of_transformers(longest: int, more: dict[str, Any]) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.5], "long_factor": [2.0, 8.0]} | more
    values = {"original_max_position_embeddings": 32, "max_position_embeddings": 256}
    config = transformers.Phi3Config(
        hidden_size=8, num_attention_heads=2, pad_token_id=None, rope_parameters=dict(rope), **values
    )
    frequencies, scale = ROPE_INIT_FUNCTIONS["longrope"](config, CPU, seq_len=longest)
    own = ModelValues(Path("config.json"), {**values, "rope_parameters": rope})
    found = read_rope(own, RopeKeys(), max_position=256)
    assert found.scaling is not None
    assert found.scaling.attention_factor == pytest.approx(scale, rel=1e-12)
    kind = LayerKind(rope_theta=found.theta, rope_scaling=found.scaling)
    torch.testing.assert_close(inverse_frequencies(kind, 4, longest), frequencies)
