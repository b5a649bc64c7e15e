"""The capacity at both ends of the cost model's error."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gapless.conf.build import build, load_group
from gapless.conf.policies import SarathiConfig
from gapless.conf.tuning import TuneConfig
from gapless.runtime.simulation.cost.error import CostError
from gapless.runtime.simulation.pipeline.setting import Setting
from gapless.runtime.simulation.tuning.bounds import Bounds
from gapless.runtime.simulation.tuning.capacity import Capacity, find_capacity
from gapless.runtime.simulation.tuning.error_range import ErrorRange, error_range, range_note
from gapless.runtime.simulation.tuning.search import Search
from gapless.runtime.simulation.tuning.space import Candidate
from gapless.runtime.simulation.tuning.trial import Trial, try_rate

PRECISION = 0.02


@pytest.fixture(scope="module")
def search() -> Search:
    return Search(
        build(
            TuneConfig,
            {
                "model": load_group("model", "llama-7b"),
                "hardware": load_group("hardware", "a100-80g"),
                "cluster": {"devices_per_node": 2},
                "workload": {
                    "name": "fixed",
                    "input_len": 700,
                    "output_len": 12,
                    "num_prompts": 60,
                    "range_ratio": 0.5,
                },
                "slo": {"ttft_p99_ms": 500.0, "tbt_p99_ms": 60.0},
                "seeds": 1,
            },
        )
    )


def setting_of(search: Search, error: CostError | None) -> Setting:
    setting = search.space.setting(Candidate(1, 2, 1, SarathiConfig(chunk=512)))
    return replace(setting, error=error)


def capacity_of(search: Search, setting: Setting) -> Capacity:
    slo, demand = search.config.slo, search.demand
    bound = Bounds(demand, slo)(setting).rate
    return find_capacity(lambda rate: try_rate(setting, demand, rate, slo), bound, PRECISION)


def test_both_ends_are_capacities_with_times_so_much_longer_and_shorter(search: Search) -> None:
    setting = setting_of(search, CostError(-0.1, 0.3, "a test"))
    found = capacity_of(search, setting)
    trials: list[Trial] = []
    off = error_range(setting, search.demand, search.config.slo, [found], PRECISION, on_trial=trials.append)
    assert off is not None
    assert off.low < found.rate / 1.15
    assert off.high > found.rate * 1.03
    assert len(trials) <= 24
    for scale, rate in ((1.3, off.low), (0.9, off.high)):
        again = setting.with_times(scale)
        assert try_rate(again, search.demand, rate, search.config.slo).carried
        assert not try_rate(again, search.demand, rate * (1 + 2 * PRECISION), search.config.slo).carried


def test_no_error_leaves_the_capacity_as_it_is(search: Search) -> None:
    setting = setting_of(search, CostError(0.0, 0.0, "a test"))
    found = capacity_of(search, setting)
    off = error_range(setting, search.demand, search.config.slo, [found], PRECISION)
    assert off is not None
    assert (off.low, off.high) == pytest.approx((found.rate, found.rate), rel=2 * PRECISION)


def test_the_range_is_carried_over_to_the_mean_of_the_seeds(search: Search) -> None:
    setting = setting_of(search, CostError(-0.1, 0.3, "a test"))
    found = capacity_of(search, setting)
    other = replace(found, rate=3 * found.rate)
    alone = error_range(setting, search.demand, search.config.slo, [found], PRECISION)
    both = error_range(setting, search.demand, search.config.slo, [found, other], PRECISION)
    assert alone is not None
    assert both == ErrorRange(pytest.approx(2 * alone.low), pytest.approx(2 * alone.high))


def test_times_so_long_that_a_decode_breaks_the_slo_carry_nothing(search: Search) -> None:
    setting = setting_of(search, CostError(0.0, 9.0, "a test"))
    off = error_range(setting, search.demand, search.config.slo, [capacity_of(search, setting)], PRECISION)
    assert off is not None
    assert off.low == 0.0 < off.high


def test_without_an_error_or_a_capacity_there_is_no_range(search: Search) -> None:
    nothing = Capacity(0.0, 1.0, None, None)
    for error, found in ((None, replace(nothing, rate=1.0)), (CostError(-0.1, 0.1, "a test"), nothing)):
        setting = setting_of(search, error)
        assert error_range(setting, search.demand, search.config.slo, [found], PRECISION) is None
    assert range_note(None) == ""
