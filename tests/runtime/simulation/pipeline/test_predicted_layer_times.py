"""Where layers differ, stages get as many as take equal time by the cost model that simulates them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

from gapless.conf.architecture import Architecture, LayerKind
from gapless.conf.build import build, load_group
from gapless.conf.experts import ExpertsConfig
from gapless.conf.latent import LatentConfig
from gapless.conf.schema import BenchConfig, EngineConfig, GenerateConfig, ServeConfig, SimulateConfig
from gapless.models.quantization.formats import LayerFormats, ModelFormats
from gapless.runtime.engine.plan import make_plan
from gapless.runtime.simulation.cost.stage_costs import MicroBatchShape
from gapless.runtime.simulation.pipeline.make_costs import make_costs
from gapless.runtime.simulation.pipeline.predicted_layer_times import layer_times
from tests.support.active_params import active_params

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


def _plan(model: Mapping[str, Any], kind: type[EngineConfig] = GenerateConfig, pp: int = 2, **more: Any) -> list[int]:
    config = {"model": model, "hardware": load_group("hardware", "cpu"), "parallel": {"pp": pp, "launcher": "ray"}}
    return [len(layers) for layers in make_plan(build(kind, config | more)).layers]


SMALL = {  # as SmolLM2-135M, whose head has as many weights as eight layers
    "vocab_size": 49152,
    "hidden_size": 576,
    "num_layers": 30,
    "num_heads": 9,
    "num_kv_heads": 3,
    "head_dim": 64,
    "ffn_size": 1536,
    "max_position": 2048,
    "tie_embeddings": True,
}


def test_a_head_counts_as_the_run_uses_it() -> None:
    """The first stage has the more layers the more of the time goes to the head: to its bytes, and to its sampler."""
    model = {"architecture": SMALL | {"num_layers": 120}, "tokenizer": "none", "dtype": "bfloat16"}

    def first(model: dict[str, Any] = model, kind: type[EngineConfig] = GenerateConfig, **more: Any) -> int:
        return _plan(model, kind, **more)[0]

    plain = first()
    drawn, nucleus = (first(sampling={"temperature": 0.5, "top_p": top_p}) for top_p in (1.0, 0.9))
    assert 60 < plain < drawn < nucleus < 75
    assert first(kind=ServeConfig) == drawn
    prompts, outputs = (
        {"workload": {"name": "fixed", "input_len": P, "output_len": D}} for P, D in ((1024, 16), (16, 256))
    )
    assert first(kind=BenchConfig, **prompts) == 60 < first(kind=BenchConfig, **outputs)
    assert first(kind=BenchConfig, **outputs) == first(kind=SimulateConfig, **outputs)


def test_a_stage_takes_no_more_layers_than_leave_room_for_keys_and_values() -> None:
    model = {"architecture": SMALL, "tokenizer": "none", "dtype": "float32"}
    drawn = {"sampling": {"temperature": 1.0, "top_p": 0.9}, "cache": {"num_blocks": 1024}}
    roomy = _plan(model, **drawn)
    bounded = _plan(model, **drawn, hardware=load_group("hardware", "cpu") | {"memory_gib": 0.7})
    assert sum(bounded) == 30
    assert roomy[0] > bounded[0] > 10


def test_layers_and_head_go_by_the_formats_of_their_weights() -> None:
    config = _config(pp=2)
    plan = make_plan(dataclasses.replace(config, model=dataclasses.replace(config.model, quantization="int8")))
    assert plan.formats is not None

    def times(formats: ModelFormats) -> list[float]:
        return layer_times(config, plan.arch, formats, 2, False)

    short = dataclasses.replace(plan.formats, layers=(LayerFormats(), *plan.formats.layers[1:]))
    short_head, head = times(short), times(dataclasses.replace(short, head=None))
    assert head[0] == short_head[0] > 1.1 * head[1] == 1.1 * head[DENSE - 1]
    assert head[-1] > short_head[-1]
    mixed = dataclasses.replace(plan, formats=short)
    before, after = (make_costs(config, each).seconds(TYPICAL) for each in (plan, mixed))
    assert after[0] > before[0]
    assert after[1] == before[1]


def test_published_sizes() -> None:
    whole = dataclasses.replace(V3, num_layers=61, layers=(LayerKind(experts=False),) * 3 + (LayerKind(),) * 58)
    assert whole.num_params / 1e9 == pytest.approx(671, rel=0.001)  # arXiv 2412.19437
    assert active_params(whole) / 1e9 == pytest.approx(37, rel=0.02)
