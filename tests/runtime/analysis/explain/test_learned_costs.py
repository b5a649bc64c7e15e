"""Costs that are learned from a run's spans, held against the model that the run was simulated by."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from gapless.runtime.analysis.explain.learned_operators import LearnedOperators
from gapless.runtime.analysis.explain.learned_run import learn_run
from gapless.runtime.analysis.explain.twin import Twin
from gapless.runtime.analysis.explain.what_if import share_beyond
from gapless.runtime.simulation.cost.stage_costs import MicroBatchShape
from gapless.runtime.simulation.pipeline.setting import make_setting
from tests.support.explained_runs import errors_of, learned_twin, run, simulated_config


@pytest.fixture(scope="module", params=["sarathi", "orca_best", "token_budget"])
def twin(request: pytest.FixtureRequest) -> Twin:
    return learned_twin(simulated_config(request.param, num_prompts=120))


def test_replay_is_the_run(twin: Twin) -> None:
    error = errors_of(twin.replay(), twin.base)
    assert max(abs(error[name]) for name in ("duration", "busy 0", "busy 1")) < 0.01
    assert max(abs(error["p99_itl_ms"]), abs(error["p99_ttft_ms"])) < 0.02


@pytest.mark.parametrize(
    ("overrides", "within"),
    [
        ({"parallel.layers": (13, 19)}, 0.03),
        ({"parallel.depth": 3}, 0.02),
        ({"scheduler": "token_budget"}, 0.06),
        ({"scheduler": "orca_best"}, 0.06),
        ({"scheduler": "sarathi", "scheduler.chunk": 128}, 0.06),
    ],
    ids=["layers", "depth", "token_budget", "orca_best", "chunk"],
)
def test_what_is_learned_carries_over(twin: Twin, overrides: Mapping[str, object], within: float) -> None:
    setting = twin.changed(overrides)
    real = run(setting.config)
    error = errors_of(twin.replay(setting=setting), real)
    assert max(abs(each) for name, each in error.items() if not name.startswith("p99")) < within


def test_sizes_that_the_run_has_not_shown_are_counted(twin: Twin) -> None:
    assert twin.learned is not None
    shown = twin.learned.fit.shown
    assert share_beyond(shown, twin.replay()) == 0
    longer = [msgspec.structs.replace(item, prompt=bytes(len(item.prompt) + 900)) for item in twin.items]
    other = Twin(twin.setting, longer, None, twin.base, twin.ledger, [], twin.learned)
    assert share_beyond(shown, other.replay()) > 0.1


def test_a_seed_draws_the_same_again(twin: Twin) -> None:
    spans = [[span.end for span in twin.replay(seed).spans] for seed in (1, 1, 2)]
    assert spans[0] == spans[1]
    assert spans[0] != spans[2]
    assert spans[2][-1] == pytest.approx(spans[0][-1], rel=0.1)


@pytest.mark.parametrize("seed", [6, 27, 33])
def test_times_that_no_content_explains_are_learned_as_noise(seed: int) -> None:
    """A machine that does much else may show nothing of what a layer takes."""
    config = simulated_config(num_prompts=20)
    record = run(config)
    seconds = 0.01 * np.exp(np.random.default_rng(seed).normal(0.0, 1.0, len(record.spans)))
    record.spans = [
        msgspec.structs.replace(span, end=span.begin + float(own))
        for span, own in zip(record.spans, seconds, strict=True)
    ]
    fit = learn_run(config, record).fit
    assert all(map(math.isfinite, (*fit.weights.values, *fit.slower)))


@pytest.mark.parametrize(("seed", "power"), [(0, -0.3), (3, -0.3), (2, -2.0)])
def test_layers_that_seem_to_take_no_time_overflow_nothing(seed: int, power: float) -> None:
    """Micro-batches of more tokens take less time here, which no layer explains."""
    config = simulated_config("prefill_first", num_prompts=20)
    record = run(config)
    rows = np.array([record.micro_batches[span.micro_batch].num_tokens for span in record.spans])
    noise = np.exp(np.random.default_rng(seed).normal(0.0, 0.3 * seed, len(rows)))
    record.spans = [
        msgspec.structs.replace(span, end=span.begin + float(own))
        for span, own in zip(record.spans, 0.01 * (rows / rows.max()) ** power * noise, strict=True)
    ]
    with np.errstate(over="raise", divide="raise", invalid="raise"):
        fit = learn_run(config, record).fit
    assert all(map(math.isfinite, (*fit.weights.values, *fit.slower)))


def test_micro_batches_beyond_the_largest_take_what_the_device_needs_at_least() -> None:
    """A run of small chunks reads weights for most of its time, so that it does not show what many rows take."""
    config = simulated_config("sarathi", num_prompts=40)
    config = replace(config, scheduler=replace(config.scheduler, chunk=16))
    small = run(config)
    floors = make_setting(config).floors
    assert floors
    seconds = {}
    for name, known in (("unknown", []), ("known", floors)):
        learned = learn_run(config, replace(small, floors=known))
        seconds[name] = learned.setting(config).costs.seconds(MicroBatchShape(((512, 0),)))[0]
    truth = make_setting(config).costs.seconds(MicroBatchShape(((512, 0),)))[0]
    assert abs(seconds["known"] / truth - 1) < abs(seconds["unknown"] / truth - 1)
    assert seconds["known"] == pytest.approx(truth, rel=0.4)


def test_slow_stage_is_told_from_the_head() -> None:
    config = simulated_config(num_prompts=120)
    whole = learned_twin(config)
    costs = whole.setting.costs
    first, second = costs.operators
    assert isinstance(second, LearnedOperators)
    slower = LearnedOperators(second.weights, key_share=second.key_share, slower=1.4 * second.slower, link=second.link)
    slow = replace(whole.setting, costs=costs.with_operators([first, slower]))
    fit = learn_run(config, whole.replay(setting=slow)).fit
    assert whole.learned is not None
    before = whole.learned.fit.slower
    assert fit.slower[1] / fit.slower[0] == pytest.approx(1.4 * before[1] / before[0], rel=0.03)
