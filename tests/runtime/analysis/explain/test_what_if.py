"""Replays paired by seed, and the ranges that they give."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from gapless.conf.schema import SimulateConfig
from gapless.runtime.analysis.explain.analysed_run import AnalysedRun
from gapless.runtime.analysis.explain.explain_json import read_explanation, write_explanation
from gapless.runtime.analysis.explain.explain_run import explain, quick_explanation
from gapless.runtime.analysis.explain.explanation import METRICS
from gapless.runtime.analysis.explain.twin import make_twin, values_of
from gapless.runtime.analysis.explain.what_if import ModelError, WhatIf, interval_of
from gapless.runtime.analysis.ledger.fleet import Fleet
from gapless.runtime.analysis.ledger.summary import summarize
from gapless.runtime.simulation.pipeline.run import start
from tests.support.explained_runs import learned_twin, run, simulated_config, workload_of, written

NO_ERROR = dict.fromkeys(METRICS, 0.0)


def jittered(config: SimulateConfig, jitter: float) -> SimulateConfig:
    return replace(config, simulation=replace(config.simulation, jitter=jitter))


def test_values_are_those_of_the_summary() -> None:
    record = run(simulated_config(request_rate=20.0))
    summary = summarize(Fleet([record]))
    assert values_of(record) == pytest.approx({metric: summary[metric] for metric in METRICS})


def test_interval_holds_nine_of_ten_pairs() -> None:
    draw = np.random.default_rng(0)
    held, trials = 0, 400
    for _ in range(trials):
        base, changed = 10 * np.exp(0.03 * draw.normal(size=10)), 8 * np.exp(0.05 * draw.normal(size=10))
        interval = interval_of(base, changed, ModelError())
        pair = 1 - 8 * math.exp(0.05 * draw.normal()) / (10 * math.exp(0.03 * draw.normal()))
        held += interval.low <= pair <= interval.high
        assert interval.low < interval.middle < interval.high
    assert 0.86 < held / trials < 0.95


def test_interval_grows_with_the_error_of_learned_times() -> None:
    base, changed = [10.0, 10.1, 9.9], [8.0, 8.1, 7.9]
    exact = interval_of(base, changed, ModelError())
    off = interval_of(base, changed, ModelError(0.1, 0.02))
    assert off.middle == exact.middle
    assert off.low < exact.low < exact.high < off.high


def test_a_change_of_a_noisy_run_lands_in_its_range(tmp_path: Path) -> None:
    config = jittered(simulated_config(), 0.2)
    twin = make_twin(written(tmp_path, run(config), config))
    what_if = WhatIf(twin)
    assert what_if.twin.is_noisy
    other = twin.changed({"scheduler.chunk": 64})
    saves = what_if.savings(other, what_if.screen(other), 10, NO_ERROR)["duration"]
    inside = 0
    for repeat in range(100, 130):  # other draws than the twin's
        pair = []
        for setting in (twin.setting, other):
            replicas, ends = start(setting, workload_of(config), repeat=repeat + 1000 * (setting is other))
            for _ in ends:
                pass
            pair.append(values_of(replicas[0].record)["duration"])
        inside += saves.low <= 1 - pair[1] / pair[0] <= saves.high
    assert saves.low < saves.high
    assert inside >= 24


def test_explanation_names_the_planted_cause(tmp_path: Path) -> None:
    config = replace(simulated_config(), parallel=replace(simulated_config().parallel, layers=(24, 8)))
    folder = written(tmp_path, run(config), config)
    explanation = explain(make_twin(folder), seconds=1000)
    assert explanation.metric == "duration"
    assert max(map(abs, explanation.error.values())) < 1e-6
    assert explanation.best is not None
    assert any(text.startswith("parallel.layers=") for text in explanation.best.overrides)
    lows = [outcome.saves["duration"].low for outcome in explanation.advices]
    assert list(explanation.outcomes[: len(lows)]) == explanation.advices
    assert lows == sorted(lows, reverse=True)
    write_explanation(tmp_path, explanation)
    assert read_explanation(tmp_path) == explanation


@pytest.mark.slow
def test_trades_come_last(tmp_path: Path) -> None:
    config = replace(simulated_config(), scheduler=replace(simulated_config().scheduler, chunk=16))  # type: ignore[call-arg]
    folder = written(tmp_path, run(config), config)
    for tolerance in (0.1, math.inf):
        explanation = explain(make_twin(folder), seconds=1000, tolerance=tolerance)
        for outcome in explanation.outcomes:
            grows = max(-outcome.saves[metric].middle for metric in METRICS[1:])
            assert outcome.is_trade == (grows > tolerance)
        sure = [outcome.is_trade for outcome in explanation.outcomes if outcome.saves["duration"].low > 0]
        assert sure == sorted(sure)
        assert any(sure) == (tolerance < math.inf)


def test_advice_is_what_the_run_with_it_shows(tmp_path: Path) -> None:
    config = replace(simulated_config(), scheduler=replace(simulated_config().scheduler, chunk=16))  # type: ignore[call-arg]
    folder = written(tmp_path, run(config), config)
    explanation = explain(make_twin(folder), seconds=1000)
    assert explanation.best is not None
    twin = make_twin(folder)
    for outcome in explanation.outcomes[:3]:
        values = {key: yaml.safe_load(value) for key, value in (text.split("=", 1) for text in outcome.overrides)}
        record = run(twin.changed(values).config)
        for metric in METRICS:
            saved = 1 - values_of(record)[metric] / explanation.run[metric]
            assert saved == pytest.approx(outcome.saves[metric].middle, abs=1e-6)


@pytest.mark.slow
def test_arrivals_that_bound_a_run_make_a_tail_the_metric(tmp_path: Path) -> None:
    config = simulated_config(request_rate=5.0)
    folder = written(tmp_path, run(config), config)
    assert explain(make_twin(folder), seconds=5).metric in ("p99_itl_ms", "p99_ttft_ms")
    assert explain(make_twin(folder), seconds=5, objective="duration").metric == "duration"


def test_a_long_run_is_replayed_in_part(tmp_path: Path) -> None:
    config = simulated_config(num_prompts=200)
    folder = written(tmp_path, run(config), config)
    explanation = explain(make_twin(folder), seconds=0.02)
    assert 50 <= explanation.replayed < explanation.requests == 200


def test_quick_explanation_says_what_it_had_no_time_for(tmp_path: Path) -> None:
    config = simulated_config()
    folder = written(tmp_path, run(config), config)
    quick = quick_explanation(AnalysedRun.read(folder), seconds=2.0)
    assert quick is not None
    hurried = quick_explanation(AnalysedRun.read(folder), seconds=1e-3)
    assert hurried is not None
    assert hurried.left
    unknown = replace(folder, summary={key: value for key, value in folder.summary.items() if key != "config"})
    assert quick_explanation(AnalysedRun.read(unknown)) is None


def test_sizes_that_a_run_has_not_shown_widen_the_range() -> None:
    config = jittered(simulated_config(), 0.05)
    config = replace(config, scheduler=replace(config.scheduler, chunk=64))  # type: ignore[call-arg]
    what_if = WhatIf(learned_twin(config))
    assert what_if.twin.is_noisy
    smaller, larger = (what_if.twin.changed({"scheduler.chunk": chunk}) for chunk in (48, 256))
    known, unknown = what_if.screen(smaller), what_if.screen(larger)
    assert known.beyond < 0.05 < 0.5 < unknown.beyond <= 1
    known_range, range_ = (
        what_if.savings(setting, screening, 5, NO_ERROR)["duration"]
        for setting, screening in ((smaller, known), (larger, unknown))
    )
    widths = [(each.high - each.low) / (1 - each.middle) for each in (known_range, range_)]
    assert widths[1] > 2 * widths[0]
    truth = values_of(run(replace(config, scheduler=larger.config.scheduler)))["duration"]
    assert range_.low < 1 - truth / values_of(what_if.twin.base)["duration"] < range_.high
