"""Routing expects of experts what drawn routes do, and their products keep the laws of any device.

Published times of kernels and of whole runs are near.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import experts as benchmark
from gapless.conf.architecture import Architecture
from gapless.conf.build import load_hardware
from gapless.conf.costs import CostsConfig
from gapless.conf.experts import ExpertsConfig
from gapless.runtime.simulation.cost.analytic import AnalyticOperators
from gapless.runtime.simulation.cost.experts import Routing, inclusion
from gapless.runtime.simulation.cost.gemm import Gemm
from gapless.runtime.simulation.cost.stage_costs import MicroBatchShape, StageCosts
from tests.support.tiers import examples

MODELS = ("mixtral-8x7b", "mixtral-8x22b", "qwen3-30b-a3b", "qwen3-235b-a22b")
DEVICES = ("a100-80g", "h100", "a6000")
SKEWS = (0.0, 0.2, 0.5, 1.0, 3.0)
law = settings(max_examples=examples(40))


@functools.cache
def arch_of(model: str) -> Architecture:
    return benchmark.arch_of(model)


@functools.cache
def costs_of(device: str) -> CostsConfig:
    return benchmark.costs_of(device)


def of(
    model: str | Architecture, device: str = "a100-80g", tp: int = 1, *, whole: bool = False, skew: float = 0.0
) -> AnalyticOperators:
    arch = arch_of(model) if isinstance(model, str) else model
    return AnalyticOperators(
        arch,
        tp,
        costs_of(device),
        2,
        attention=load_hardware(device).attention,
        expert_parallel=whole,
        expert_skew=skew,
    )


def products(source: AnalyticOperators, tokens: int) -> float:
    return source.linear("ffn_ln1", tokens) + source.linear("ffn_ln2", tokens)


@law
@given(st.integers(1, 300), st.data(), st.floats(0, 10))
def test_each_token_picks_k_experts(number: int, data: st.DataObject, skew: float) -> None:
    picked = data.draw(st.integers(1, number))
    found = inclusion(number, picked, skew)
    assert found.sum() == pytest.approx(picked, rel=1e-6)
    assert (np.diff(found) <= 1e-12).all()
    assert 0 <= found.min() <= found.max() <= 1


@pytest.mark.parametrize("skew", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("number", "picked", "ranks"), [(8, 2, 1), (8, 2, 8), (128, 8, 1), (128, 8, 8), (64, 6, 4)])
def test_expectations_are_those_of_drawn_routes(number: int, picked: int, ranks: int, skew: float) -> None:
    """Draws of k experts without replacement, 200 micro-batches of each size, against the three expectations."""
    rng = np.random.default_rng(0)
    logits = -skew * np.log(np.arange(1, number + 1))
    routing, tile = Routing(ExpertsConfig(num_experts=number, experts_per_token=picked), skew, ranks), 64
    for tokens in (1, 8, 64, 512):
        noise = rng.gumbel(size=(200, tokens, number))
        routes = np.argpartition(-(logits + noise), picked - 1, axis=2)[:, :, :picked]
        rows = np.zeros((200, number), int)
        for one, route in zip(rows, routes, strict=True):
            np.add.at(one, route.ravel(), 1)
        by_rank = np.stack([rows[:, rank::ranks] for rank in range(ranks)], axis=1)  # [200, ranks, experts]
        loads = by_rank.sum(axis=2)
        busiest = np.take_along_axis(by_rank, loads.argmax(axis=1)[:, None, None], axis=1)[:, 0]
        at = np.array([float(tokens)])
        near = 0.02 if ranks == 1 else 0.19 if tokens == 1 else 0.12
        assert routing.rows(at)[0] == pytest.approx(loads.max(axis=1).mean(), rel=near)
        assert routing.active(at)[0] == pytest.approx((busiest > 0).sum(axis=1).mean(), rel=near)
        tiles = np.ceil(busiest / tile).sum(axis=1).mean()
        assert routing.row_tiles(at, np.array([float(tile)]))[0, 0] == pytest.approx(tiles, rel=near)


@law
@given(st.sampled_from(MODELS), st.sampled_from((1, 2, 4, 8)), st.floats(0, 1), st.floats(0, 1), st.integers(1, 9000))
def test_more_skew_never_gives_the_busiest_rank_less(
    model: str, ranks: int, one: float, other: float, tokens: int
) -> None:
    """Up to an exponent of 1. Far beyond, every token picks the same k experts, which lie on different ranks."""
    experts = arch_of(model).experts
    assert experts is not None
    even, skewed = (Routing(experts, skew, ranks) for skew in sorted((one, other)))
    share = experts.experts_per_token / ranks
    assert share * (1 - 1e-9) <= even.pairs <= skewed.pairs * (1 + 1e-9)
    rows = [float(routing.rows(np.array([tokens]))[0]) for routing in (even, skewed)]
    if tokens * share > 64:  # below, chance outweighs the skew, and it is less where an expert is picked for sure
        assert rows[0] <= rows[1] * (1 + 1e-9)
    for each in rows:
        assert tokens * share * (1 - 1e-9) <= each <= tokens * experts.experts_per_token


@law
@given(
    st.sampled_from(MODELS),
    st.sampled_from(DEVICES),
    st.sampled_from((1, 2, 4, 8)),
    st.booleans(),
    st.sampled_from(SKEWS),
    st.integers(1, 9000),
    st.integers(0, 500),
)
def test_more_tokens_never_take_less(
    model: str, device: str, tp: int, whole: bool, skew: float, tokens: int, more: int
) -> None:
    source = of(model, device, tp, whole=whole, skew=skew)
    for seconds in (
        functools.partial(source.linear, "ffn_ln1"),
        functools.partial(source.linear, "ffn_ln2"),
        source.routing,
        source.others,
    ):
        assert 0 < seconds(tokens) <= seconds(tokens + more) * (1 + 1e-12)


@law
@given(st.sampled_from(DEVICES), st.integers(1, 9000), st.integers(1, 15), st.integers(1, 15))
def test_more_experts_that_compute_never_take_less(device: str, tokens: int, picked: int, more: int) -> None:
    """At the same number of rows: more experts are read. At the same number of experts: more rows are computed."""
    arch = arch_of("qwen3-30b-a3b")

    def seconds(number: int, picked: int) -> float:
        experts = ExpertsConfig(num_experts=number, experts_per_token=picked)
        return products(of(dataclasses.replace(arch, experts=experts), device), tokens)

    assert seconds(30, picked) <= seconds(30, picked + more) * (1 + 1e-12)
    gemm = Gemm(costs_of(device).gemm, costs_of(device).multiprocessors, 2)
    tiles = np.full(len(gemm.tile_rows), float(tokens))
    few, many = (
        gemm.grouped_seconds(np.array(float(tokens)), tiles, np.array(float(active)), 2048, 1536)
        for active in (picked, picked + more)
    )
    assert few <= many


@pytest.mark.parametrize("model", MODELS)
def test_skew_costs_where_ranks_hold_whole_experts_and_have_much_to_compute(model: str) -> None:
    times = [products(of(model, "h100", 8, whole=True, skew=skew), 16384) for skew in (0.0, 0.5, 1.0)]
    assert times == sorted(times)
    assert times[2] > 1.3 * times[0]
    sliced = [products(of(model, "h100", 8, skew=skew), 16384) for skew in (0.0, 0.5, 1.0)]
    assert sliced == pytest.approx([sliced[0]] * 3, rel=0.03)


def test_few_tokens_read_few_experts() -> None:
    """A token alone reads 2 of 8 experts; 64 tokens read all."""
    source, dense = of("mixtral-8x7b"), of(dataclasses.replace(arch_of("mixtral-8x7b"), experts=None))
    alone = products(dense, 1)
    assert products(source, 1) == pytest.approx(2 * alone, rel=0.1)
    assert products(source, 64) == pytest.approx(8 * alone, rel=0.2)


@pytest.mark.parametrize("tokens", [2048, 4096, 8192])
def test_one_expert_is_a_feed_forward_block(tokens: int) -> None:
    arch = arch_of("mixtral-8x7b")
    dense = of(dataclasses.replace(arch, experts=None))
    alone = of(dataclasses.replace(arch, experts=ExpertsConfig(num_experts=1, experts_per_token=1)))
    assert products(alone, tokens) == pytest.approx(products(dense, tokens), rel=1e-3)
    for whole in (False, True):
        assert products(of(arch, whole=whole), tokens) == products(of(arch), tokens)


def test_a_shared_expert_is_a_feed_forward_block_more() -> None:
    arch = arch_of("qwen3-30b-a3b")
    assert arch.experts is not None
    shared = dataclasses.replace(arch, experts=dataclasses.replace(arch.experts, shared_ffn_size=arch.ffn_size))
    dense = of(dataclasses.replace(arch, experts=None))
    assert products(of(shared), 100) - products(of(arch), 100) == pytest.approx(products(dense, 100))
    assert of(shared).others(100) > of(arch).others(100)


@pytest.mark.parametrize("sampled", [1, 40])
def test_parts_of_a_stage_add_up(sampled: int) -> None:
    stages = StageCosts((16, 16), [of("mixtral-8x7b", tp=2)] * 2)
    shape = MicroBatchShape(((200, 64),), 39, 39 * 500, sampled)
    for stage, seconds in enumerate(stages.seconds(shape)):
        parts = stages.breakdown(shape, stage)
        assert sum(parts.values()) == pytest.approx(seconds)
        assert parts["routing"] > 0
        assert parts["ffn_ln1"] > parts["preproj"]


def test_published_times_of_kernels() -> None:
    """The times are those of the tables of `python -m benchmarks.experts`.

    Where launches take longer than kernels, and from 1,536 tokens on with narrow experts on an H200, the model is
    farther off (docs/cost_model.md).
    """
    mixtral, experts_64, experts_128 = benchmark.LAYERS
    for layer, tokens, near in (
        (mixtral, list(mixtral.published), 0.13),
        (experts_64, [4, 16, 64, 256, 1024, 4096], 0.09),
        (experts_128, [16, 24, 32, 48, 64, 96, 128, 256, 512, 1024], 0.16),
    ):
        for number in tokens:
            assert benchmark.layer_us(layer, number) == pytest.approx(layer.published[number], rel=near)


@pytest.mark.parametrize("run", benchmark.RUNS[:3], ids=lambda run: f"{run.model}-tp{run.tp}")
def test_published_times_of_whole_batches(run: benchmark.Run) -> None:
    for batch, published in run.published.items():
        assert benchmark.run_seconds(run, batch) == pytest.approx(published, rel=0.21)
