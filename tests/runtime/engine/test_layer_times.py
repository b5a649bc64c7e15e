"""Where layers differ, stages get as many as take equal time by the cost model that simulates them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from gapless.conf.architecture import Architecture, LayerKind
from gapless.conf.build import build, load_group
from gapless.conf.experts import ExpertsConfig
from gapless.conf.latent import LatentConfig
from gapless.conf.schema import HardwareConfig, ParallelConfig, SimulateConfig
from gapless.runtime.cost.stage_costs import MicroBatchShape
from gapless.runtime.engine.layer_times import layer_times
from gapless.runtime.engine.plan import make_plan
from gapless.runtime.simulation.make_costs import make_costs

EXPERTS = ExpertsConfig(num_experts=256, experts_per_token=8, ffn_size=2048, shared_ffn_size=2048)
LATENT = LatentConfig(rank=512, query_rank=1536, head_dim=128, rotary_dim=64, value_dim=128)
DENSE = 6
V3 = Architecture(  # DeepSeek V3, of a few layers and with more dense ones
    vocab_size=129280,
    hidden_size=7168,
    num_layers=16,
    num_heads=128,
    num_kv_heads=1,
    head_dim=576,
    ffn_size=18432,
    max_position=4096,
    experts=EXPERTS,
    latent=LATENT,
    layers=(LayerKind(experts=False),) * DENSE + (LayerKind(),) * (16 - DENSE),
)
TYPICAL = MicroBatchShape([(192, 1024)], decodes=64, context=64 * 1024, sampled=64)


def _config(**parallel: Any) -> SimulateConfig:
    return build(
        SimulateConfig,
        {
            "model": {"architecture": dataclasses.asdict(V3), "tokenizer": "none"},
            "hardware": load_group("hardware", "h200"),
            "parallel": {"pp": 4, "tp": 8, "launcher": "ray"} | parallel,
        },
    )


@pytest.mark.parametrize("whole", [False, True])
def test_the_split_is_even_by_the_cost_model(whole: bool) -> None:
    config = _config(expert_parallel=whole)
    plan = make_plan(config)
    counts = [len(layers) for layers in plan.layers]
    assert counts[0] > counts[-1]
    slowest = max(make_costs(config, plan).seconds(TYPICAL))
    for layers in ((4, 4, 4, 4), (6, 3, 4, 3), (6, 4, 3, 3), (7, 3, 3, 3), (5, 4, 4, 3), (8, 3, 3, 2)):
        other = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, layers=layers))
        assert slowest <= 1.02 * max(make_costs(other, make_plan(other)).seconds(TYPICAL))


def test_layers_go_by_their_weights_where_the_hardware_is_unknown() -> None:
    times = layer_times(V3, ParallelConfig(), HardwareConfig(), 2)
    assert times is not None
    assert sum(times) == pytest.approx(16)
    assert times[DENSE] / times[0] == pytest.approx(V3.params_of(V3.kind(DENSE)) / V3.params_of(V3.kind(0)))
    assert layer_times(dataclasses.replace(V3, layers=()), ParallelConfig(), HardwareConfig(), 2) is None


def test_published_sizes() -> None:
    whole = dataclasses.replace(V3, num_layers=61, layers=(LayerKind(experts=False),) * 3 + (LayerKind(),) * 58)
    assert whole.num_params / 1e9 == pytest.approx(671, rel=0.001)  # arXiv 2412.19437
    assert whole.active_params / 1e9 == pytest.approx(37, rel=0.02)
