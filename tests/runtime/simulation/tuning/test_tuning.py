"""Tests of capacity and search: bisection finds thresholds, bounds hold, the race finds what brute force finds."""

from __future__ import annotations

import gzip
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.conf.build import build, load_group
from gapless.conf.errors import ConfigError
from gapless.conf.policies import EqualTimeConfig, OrcaBestConfig, SarathiConfig, TokenBudgetConfig
from gapless.conf.tuning import TailSlo, TuneConfig
from gapless.models.tokenizer import load_tokenizer
from gapless.runtime.analysis.ledger.fleet import Fleet
from gapless.runtime.analysis.ledger.summary import summarize
from gapless.runtime.analysis.report.tuning.charts import charts, pareto
from gapless.runtime.analysis.report.tuning.tables import misfit_rows, tried_rows
from gapless.runtime.simulation.cost.stage_costs import MicroBatchShape
from gapless.runtime.simulation.pipeline.replicas import make_replicas, run_fleet
from gapless.runtime.simulation.pipeline.run import simulated
from gapless.runtime.simulation.pipeline.setting import Setting, make_setting
from gapless.runtime.simulation.tuning.bounds import Bounds
from gapless.runtime.simulation.tuning.capacity import ConfidenceInterval, SeededCapacities, find_capacity
from gapless.runtime.simulation.tuning.demand import Demand
from gapless.runtime.simulation.tuning.paired import compare
from gapless.runtime.simulation.tuning.search import Search
from gapless.runtime.simulation.tuning.search_result import SearchResult
from gapless.runtime.simulation.tuning.space import Candidate, chunked
from gapless.runtime.simulation.tuning.trial import Trial, try_rate
from gapless.runtime.simulation.workload import make_workload


def config(**keys: Any) -> TuneConfig:
    """Return a config of LLaMA-7B on a node of two A100s with few short requests, changed by `keys`."""
    mapping: dict[str, Any] = {
        "model": load_group("model", "llama-7b"),
        "hardware": load_group("hardware", "a100-80g"),
        "cluster": {"devices_per_node": 2},
        "workload": {"name": "fixed", "input_len": 700, "output_len": 12, "num_prompts": 60, "range_ratio": 0.5},
        "slo": {"ttft_p99_ms": 500.0, "tbt_p99_ms": 60.0},
        "seeds": 1,
        "precision": 0.01,
    }
    for key, value in keys.items():
        mapping[key] = mapping.get(key, {}) | value if isinstance(value, dict) else value
    return build(TuneConfig, mapping)


def a_setting(search: Search, **keys: Any) -> Setting:
    policy = keys.pop("policy", SarathiConfig(chunk=512))
    return search.space.setting(Candidate(**{"tp": 1, "pp": 2, "replicas": 1, "policy": policy} | keys))


# Bisection.


def measure(setting: Setting, demand: Demand, rate: float) -> dict[str, Any]:
    return summarize(Fleet([replica.record for replica in simulated(setting, demand.at(rate))]))


def threshold(at: float) -> Any:
    """Make trials that carry every rate up to `at`."""
    return lambda rate: Trial(rate, "" if rate <= at else "too much", 10, 1.0, 1.0)


@given(
    at=st.floats(0.05, 100.0),
    precision=st.sampled_from([0.003, 0.01, 0.1]),
    guess=st.none() | st.floats(1e-3, 90.0),
)
def test_bisection_finds_the_threshold(at: float, precision: float, guess: float | None) -> None:
    found = find_capacity(threshold(at), 101.0, precision, guess=guess)
    assert found.rate <= at < found.above <= found.rate * (1 + precision)
    assert found.trial is not None
    assert found.trial.rate == found.rate
    assert not found.not_monotone
    assert len(found.trials) <= 40
    assert found.requests == 10 * len(found.trials)


def test_what_carries_nothing_says_why() -> None:
    found = find_capacity(threshold(0.0), 8.0, 0.01)
    assert (found.rate, found.trial, found.why) == (0.0, None, "too much")
    assert len(found.trials) <= 14


def test_a_rate_that_passes_by_luck_does_not_count() -> None:
    def lucky(rate: float) -> Trial:  # carries up to 2, and again from 2.6 to 3
        return Trial(rate, "" if rate <= 2.0 or 2.6 <= rate <= 3.0 else "too much", 1)

    found = find_capacity(lucky, 4.0, 0.01, guess=2.9)
    assert 1.98 <= found.rate <= 2.0
    assert found.not_monotone


def test_interval_of_seeds() -> None:
    interval = ConfidenceInterval.from_rates([1.0, 2.0, 3.0])
    assert interval.mean == pytest.approx(2.0)
    assert interval.half == pytest.approx(4.303 / math.sqrt(3), rel=1e-3)  # Student's t, 2 degrees of freedom
    assert (interval.lowest, interval.highest, interval.text) == (1.0, 3.0, "2.00 ± 2.48")
    assert ConfidenceInterval.from_rates([123.4]).text == "123"
    assert ConfidenceInterval.from_rates([0.0]).half is None


# Demands.


def test_a_demand_at_a_rate_is_what_its_config_draws() -> None:
    search = Search(config(seeds=2, workload={"burstiness": 0.5, "seed": 3}))
    own, other = search.demands[:2]
    at_rate = own.config_at(search.config.workload, 7.5)
    assert (at_rate.request_rate, at_rate.num_prompts) == (7.5, 60)
    drawn = make_workload(at_rate, vocab_size=32000, context=2048, tokenizer=load_tokenizer(None, 32000))
    assert np.allclose(drawn.arrivals, own.at(7.5).arrivals, rtol=1e-12)
    assert (drawn.input_lens == own.unit.input_lens).all()
    assert not np.array_equal(own.unit.input_lens, other.unit.input_lens)
    assert own.unit.arrivals[-1] == pytest.approx(60, rel=0.6)  # at 1 request/s


def test_a_trace_comes_faster_and_seeds_are_its_stretches(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv.gz"
    rows = [f"{0.5 * n + 0.1 * (n % 3)},{100 + n},{5 + n % 7}" for n in range(100)]
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.write("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    workload = {"name": "trace", "path": str(path), "num_prompts": 40}
    search = Search(
        build(
            TuneConfig,
            {
                "model": load_group("model", "llama-7b"),
                "hardware": load_group("hardware", "a100-80g"),
                "workload": workload,
                "slo": {"ttft_p99_ms": 500.0},
                "seeds": 3,
            },
        )
    )
    firsts = [demand.unit.input_lens[0] for demand in search.demands]
    assert firsts == [100, 130, 160, 115, 145, 108]  # halfway, once the even ones are used
    own = search.demand
    assert own.own_rate == pytest.approx(39 / 19.5, rel=0.02)
    at_rate = own.config_at(search.config.workload, 12.0)
    drawn = make_workload(at_rate, vocab_size=32000, context=2048, tokenizer=load_tokenizer(None, 32000))
    assert np.allclose(drawn.arrivals, own.at(12.0).arrivals, atol=1e-9)
    assert len(own.sample(10)) == 10


def test_too_few_requests_for_a_p99() -> None:
    with pytest.raises(ConfigError, match=r"^workload.num_prompts=19: must be at least 20"):
        Search(config(workload={"num_prompts": 19}))


# One setting at one rate.


def test_a_trial_says_what_a_whole_run_measures() -> None:
    search = Search(config())
    setting = a_setting(search)
    trial = try_rate(setting, search.demand, 5.0, search.config.slo)
    numbers = measure(setting, search.demand, 5.0)
    assert trial.carried
    assert (trial.ttft_p99_ms, trial.tbt_p99_ms) == (numbers["p99_ttft_ms"], numbers["p99_itl_ms"])
    assert trial.requests == 60
    assert 0 < numbers["bubble_fraction_inner"] + np.mean(numbers["stage_busy_fraction"]) < 1


@pytest.mark.parametrize(
    ("slo", "what"),
    [
        (TailSlo(ttft_p99_ms=400.0), "p99 TTFT"),
        (TailSlo(tbt_p99_ms=12.0), "p99 TBT"),
    ],
)
def test_what_is_cut_short_would_have_failed(slo: TailSlo, what: str) -> None:
    search = Search(config(workload={"num_prompts": 400}))
    setting = a_setting(search)
    trial = try_rate(setting, search.demand, 60.0, slo)
    assert what in trial.why
    assert trial.requests < 400
    numbers = measure(setting, search.demand, 60.0)
    over = {"p99_ttft_ms": slo.ttft_p99_ms, "p99_itl_ms": slo.tbt_p99_ms}
    assert any(bound is not None and numbers[key] > bound for key, bound in over.items())


def test_requests_that_pile_up_are_not_carried() -> None:
    search = Search(config())
    trial = try_rate(a_setting(search), search.demand, 500.0, TailSlo(ttft_p99_ms=1e9))
    assert trial.why.startswith("the queue grows: TTFT rises by")


# Bounds.


@pytest.mark.parametrize(
    "policy",
    [
        SarathiConfig(chunk=128),
        SarathiConfig(chunk=1024),
        TokenBudgetConfig(max_batched_tokens=512),
        EqualTimeConfig(),
        OrcaBestConfig(),
    ],
)
@pytest.mark.parametrize("grid", [(1, 2, 1), (2, 1, 1), (1, 1, 2)])
def test_nothing_exceeds_its_bound(policy: Any, grid: tuple[int, int, int]) -> None:
    search = Search(config(workload={"input_len": 300, "output_len": 40}))
    setting = a_setting(search, policy=policy, tp=grid[0], pp=grid[1], replicas=grid[2])
    bound = Bounds(search.demand, search.config.slo)(setting).rate
    reached = measure(setting, search.demand, 1e6)["request_throughput"]  # all at once
    assert 0.3 * bound < reached < bound


def test_an_slo_that_cannot_be_met_is_known_without_a_simulation() -> None:
    search = Search(config())
    for slo, why in ((TailSlo(tbt_p99_ms=1.0), "a single decode takes"), (TailSlo(ttft_p99_ms=1.0), "a stage takes")):
        bound = Bounds(search.demand, slo)(a_setting(search))
        assert bound.rate == 0.0
        assert bound.why.startswith(why)


# The space.


def test_grids_use_all_devices_and_say_what_does_not_fit() -> None:
    wanted = config(
        model=load_group("model", "llama2-70b"),
        nodes=2,
        hardware=load_group("hardware", "a100-80g"),
        cluster={"devices_per_node": 4},
    )
    search = Search(wanted)
    grids = search.space.grids()
    assert {(tp, pp) for tp, pp, _ in grids} == {
        (1, 2), (1, 4), (1, 8), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2),
    }  # fmt: skip
    assert all(tp * pp * replicas == 8 for tp, pp, replicas in grids)
    refused = {(m.tp, m.pp): m.why for m in search.space.misfits}
    assert set(refused) == {(1, 1)}
    assert refused[1, 1].startswith("hardware.memory_gib=67.06: the weights of stage 0 alone take 128 GiB per rank")


def test_nothing_fits() -> None:
    with pytest.raises(ConfigError, match=r"^nodes=1: no tp x pp on 2 devices holds the model: .*alone take"):
        Search(config(model=load_group("model", "gpt3-175b")))


def test_windows_let_requests_be_longer_than_the_blocks_of_a_cache() -> None:
    """Of a request with a window of 256 tokens 33 blocks are held at once, of 64."""
    shape = load_group("model", "llama-7b")["architecture"] | {"sliding_window": 256}
    keys: dict[str, Any] = {
        "cache": {"num_blocks": 64, "block_size": 16},
        "workload": {"input_len": 1500, "range_ratio": 0.0},
    }
    assert Search(config(model={"architecture": shape}, **keys)).demand.unit.input_lens.max() == 1500
    with pytest.raises(ConfigError, match="requests have up to 1512 tokens, but a request may have 1024"):
        Search(config(**keys))


def test_what_is_asked_for_and_cannot_be_is_said() -> None:
    search = Search(config(search={"tp": [1, 3], "pp": [1, 4]}))
    search.space.grids()
    assert [row[1] for row in misfit_rows_of(search)] == [
        "4 ranks per replica do not divide 2 devices",
        "3 ranks per replica do not divide 2 devices",
        "12 ranks per replica do not divide 2 devices",
    ]


def misfit_rows_of(search: Search) -> list[tuple[str, ...]]:
    found = SearchResult([], search.space.misfits, [], [], [], search.demands, None, 0, 0, 0)
    return list(misfit_rows(found).rows)


def test_times_that_settings_share_are_those_of_each_alone() -> None:
    wide = {"hardware": load_group("hardware", "a100-80g"), "cluster": {"devices_per_node": 4}}
    candidates = [Candidate(2, pp, 2 // pp, SarathiConfig(chunk=512)) for pp in (1, 2)]  # embedding sliced, and whole
    shape = MicroBatchShape(chunks=((500, 0),), decodes=12, context=9000, sampled=12)
    for order in (candidates, candidates[::-1]):
        together = Search(config(**wide)).space
        for candidate in order:
            alone = make_setting(together.config_of(candidate))
            assert together.setting(candidate).costs.seconds(shape) == alone.costs.seconds(shape)


def test_b_that_fills_the_kv_cache_is_tried_where_it_is_below_the_bound() -> None:
    search = Search(config(workload={"input_len": 1000, "output_len": 100}))
    candidate = Candidate(1, 1, 2, SarathiConfig(max_batch=4096))
    fitting, demand = search.space.fitting_batch(candidate, search.demand), search.demand
    assert fitting is not None
    plan = search.space.setting(replace(candidate, batch=fitting)).plan
    assert plan.limits.batch == fitting < 4096
    held = fitting * -(-1100 // plan.block_size)
    assert held <= plan.num_blocks < held * (fitting + 1) / fitting
    assert search.space.fitting_batch(replace(candidate, policy=SarathiConfig(max_batch=2)), demand) is None
    most = plan.limits.running
    for running, batches in ((most - 1, {fitting}), (most, {fitting, None}), (None, {fitting, None})):
        first = replace(candidate, batch=fitting)
        assert {c.batch for c in search.space.variants(first, demand, running)} == batches


def test_splits_and_depths_are_neighbours() -> None:
    search = Search(config())
    variants = search.space.variants(Candidate(1, 2, 1, SarathiConfig(chunk=512)), search.demand)
    assert variants[0].extra_depth is None
    assert {variant.extra_depth for variant in variants} == {None, 1}
    for variant in variants:
        assert variant.layers is None or sum(variant.layers) == 32
        search.space.setting(variant)
    labels = [variant.label for variant in variants]
    assert len(set(labels)) == len(labels)


def test_chunks_of_policies_that_have_some() -> None:
    assert chunked(SarathiConfig(), (64, 128)) == [SarathiConfig(chunk=64), SarathiConfig(chunk=128)]
    assert chunked(TokenBudgetConfig(), (64,)) == [TokenBudgetConfig(max_batched_tokens=64)]
    assert chunked(OrcaBestConfig(), (64, 128)) == [OrcaBestConfig()]


# Closed loops.


def test_the_best_of_a_closed_loop_is_that_of_every_setting() -> None:
    loop = {"max_concurrency": 6, "request_rate": None, "range_ratio": 0.0, "output_len": 40, "distinct_prompts": 3}
    keys = {"workload": loop, "slo": {"ttft_p99_ms": None, "tbt_p99_ms": None}, "policies": [{"name": "token_budget"}]}
    searches = [Search(config(**keys, search={"chunk": [128, 1024], "exhaustive": each})) for each in (True, False)]
    every, raced = [search.run() for search in searches]
    assert every.winner is not None
    assert raced.winner is not None
    assert raced.winner.rate >= max(tried.low for tried in every.tried) * 0.99
    assert all(trial.rate == tried.low for tried in every.tried if (trial := tried.low_trial))
    timed = Search(
        config(**keys | {"workload": loop | {"num_prompts": None, "duration_s": 3.0}}, search={"replicas": [1]})
    )
    assert {tried.candidate.replicas for tried in timed.race()} == {1}
    assert timed.simulations == len({candidate for candidate, _ in timed.carried}), "each is simulated once"
    cached = [Search(config(**keys | {"workload": loop | {"distinct_prompts": n}})) for n in (3, None)]
    bounds = [Bounds(search.demand, search.config.slo)(a_setting(search)).rate for search in cached]
    assert bounds[0] > bounds[1], "what is cached is not computed"


# Settings on the same seeds.


def test_settings_meet_the_same_arrivals_scaled_by_the_rate() -> None:
    search = Search(config(seeds=2, max_seeds=3))
    assert len(search.demands) == 3
    settings = [a_setting(search), a_setting(search, policy=OrcaBestConfig())]
    came: dict[tuple[int, int], list[float]] = {}
    for number, setting in enumerate(settings):
        for seed, demand in enumerate(search.demands):
            for rate in (2.0, 4.0):
                (replica,) = fleet = make_replicas(setting, repeat=seed + 1)
                for _ in run_fleet(fleet, demand.at(rate).without_prompts(), router="round_robin"):
                    pass
                arrivals = sorted(request.arrival for request in replica.record.requests)
                unit = [(arrival - arrivals[0]) * rate for arrival in arrivals]
                assert unit == pytest.approx(came.setdefault((0, seed), unit)), number
    assert came[0, 0] != pytest.approx(came[0, 1])


def test_seeds_are_added_while_settings_cannot_be_told_apart() -> None:
    search = Search(config(seeds=2, max_seeds=4))
    close = [a_setting(search, policy=SarathiConfig(chunk=chunk)) for chunk in (512, 520)]
    far = a_setting(search, policy=OrcaBestConfig())
    trials: list[int] = []
    by_seed = SeededCapacities(
        [*close, far], search.demands, search.config.slo, 0.01, on_trial=lambda number, trial: trials.append(number)
    )
    found = compare(by_seed.rate, 3, least=2, most=4, resolution=0.01)
    assert [len(own) for own in found.rates] == [len(own) for own in by_seed.found]
    assert set(trials) == {0, 1, 2}
    assert len(found.rates[0]) == len(found.rates[1]) or "less" in found.verdicts


def test_a_short_trace_has_no_section_twice(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    rows = [f"{0.5 * n},{100 + n},{5 + n % 7}" for n in range(40)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]), encoding="utf-8")
    workload = {"name": "trace", "path": str(path), "num_prompts": 40}
    assert (
        len(
            Search(
                build(
                    TuneConfig,
                    {
                        "model": load_group("model", "llama-7b"),
                        "hardware": load_group("hardware", "a100-80g"),
                        "workload": workload,
                        "slo": {"ttft_p99_ms": 500.0},
                        "seeds": 3,
                    },
                )
            ).demands
        )
        == 1
    )


# The search.

SPACES = [
    {"slo": {"ttft_p99_ms": 400.0, "tbt_p99_ms": 40.0}, "workload": {"num_prompts": 40, "output_len": 6}},
    {"slo": {"ttft_p99_ms": 900.0}, "workload": {"num_prompts": 30, "input_len": 250, "output_len": 12}},
]


@pytest.mark.parametrize("keys", SPACES)
def test_search_is_not_behind_brute_force(keys: dict[str, Any]) -> None:
    base = config(
        **keys,
        policies=[{"name": "sarathi"}, {"name": "orca_best"}],
        search={"tp": [1], "chunk": [256, 1024], "depth": [1], "finalists": 2, "batch": False, "layers": False},
    )
    raced = Search(base).run()
    brute = Search(replace(base, search=replace(base.search, exhaustive=True)))
    best = max(tried.low for tried in brute.exhaust())
    assert raced.winner is not None
    assert raced.winner.rate >= 0.98 * best
    assert raced.requests < 0.6 * brute.requests
    assert raced.simulations < 0.6 * brute.simulations
    again = Search(base).run()
    assert again.winner is not None
    assert (again.winner.candidate, again.winner.rate) == (raced.winner.candidate, raced.winner.rate)
    assert again.requests == raced.requests

    # The result is complete.
    assert len(tried_rows(raced).rows) == len(raced.tried)
    (won,) = [tried for tried in raced.tried if tried.candidate == raced.winner.candidate]
    assert (won.low, won.rung) == (raced.winner.rate, "whole")
    assert all(tried.why for tried in raced.tried)
    front = [trial for _, trial in pareto(raced.carried, lambda trial: trial.tbt_p99_ms)]
    assert front
    for trial in front:
        assert not any(t.rate > trial.rate and t.tbt_p99_ms < trial.tbt_p99_ms for _, t in raced.carried)  # type: ignore[operator]
    assert max(trial.rate for trial in front) == max(trial.rate for _, trial in raced.carried)
    assert {chart.name for chart in charts(raced, base.slo)} >= {"rate_against_tbt", "rate_against_ttft"}


@settings(max_examples=5)
@given(st.integers(60, 200), st.integers(1, 30))
def test_a_sample_has_the_lengths_of_all(num: int, some: int) -> None:
    search = Search(config(workload={"num_prompts": num}))
    part: Demand = search.demand.sample(some)
    assert len(part) == min(num, some)
    assert (part.unit.arrivals == search.demand.unit.arrivals[: len(part)]).all()
    if some >= 10:
        for share in (10, 50, 90):
            whole, of_it = (np.percentile(demand.unit.input_lens, share) for demand in (search.demand, part))
            assert of_it == pytest.approx(whole, rel=0.12)
