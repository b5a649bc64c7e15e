"""Tests of telling settings apart: equal ones rarely get a winner, clear differences are found with few seeds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.runtime.simulation.tuning.paired import LEVEL, Comparison, Difference, compare
from tests.support.tiers import first_quick

SEARCHES = 2000


def drawn(random: np.random.Generator, means: list[float], spread: float, noise: float) -> Callable[[int, int], float]:
    """Draws capacities: a seed moves those of all settings by `spread`, and each by `noise` of its own."""
    seeds = random.normal(0.0, spread, 60)
    own = random.normal(0.0, noise, (len(means), 60))
    return lambda number, seed: float(means[number] + seeds[seed] + own[number, seed])


def searches(means: list[float], *, noise: float, least: int = 3, most: int = 6) -> list[Comparison]:
    random = np.random.default_rng(7)
    return [
        compare(drawn(random, means, 3.0, noise), len(means), least=least, most=most, resolution=0.001)
        for _ in range(SEARCHES)
    ]


@pytest.mark.parametrize(
    ("number", "least", "most"), first_quick([(3, 3, 6), (2, 3, 6), (6, 2, 4), (2, 2, 30), (3, 5, 5)])
)
def test_equal_settings_rarely_get_a_winner(number: int, least: int, most: int) -> None:
    found = searches([20.0] * number, noise=2.0, least=least, most=most)
    winners = sum(comparison.verdicts.count("less") == number - 1 for comparison in found)
    first_is_less = sum(comparison.verdicts[0] == "less" for comparison in found)
    margin = 3 * (LEVEL / SEARCHES) ** 0.5
    assert winners / SEARCHES <= LEVEL + margin
    assert first_is_less / SEARCHES <= LEVEL / 2 + margin


def test_a_clear_difference_is_found_though_the_means_have_wide_intervals() -> None:
    """Seeds move capacities by 3, so that the intervals of the means overlap; their differences hardly move."""
    found = searches([20.0, 19.0, 17.0], noise=0.15)
    assert sum(comparison.verdicts == ["best", "less", "less"] for comparison in found) > 0.97 * SEARCHES
    apart = np.mean([len(comparison.rates[2]) for comparison in found])
    assert apart < 4.0  # the worst is told apart before the seeds are used up


def test_small_differences_are_a_tie_or_equal_and_use_more_seeds() -> None:
    found = searches([20.0, 19.9], noise=1.0)
    assert sum("less" not in comparison.verdicts for comparison in found) > 0.9 * SEARCHES
    assert all(len(comparison.rates[0]) == 6 for comparison in found if "tie" in comparison.verdicts)
    same = compare(lambda number, seed: 5.0 + seed, 2, least=3, most=6)
    assert same.verdicts == ["best", "equal"]
    assert [len(rates) for rates in same.rates] == [3, 3]


def test_what_the_bisection_cannot_resolve_is_no_difference() -> None:
    found = compare(lambda number, seed: 5.0 + 0.03 * number, 2, least=3, most=6, resolution=0.01)
    assert found.verdicts == ["equal", "best"]


def test_one_seed_tells_nothing_apart_and_one_setting_is_the_best() -> None:
    assert compare(lambda number, seed: float(number), 2, least=1, most=1).verdicts == ["tie", "best"]
    alone = compare(lambda number, seed: 1.0 + seed, 1, least=3, most=9)
    assert (alone.verdicts, alone.rates) == (["best"], [[1.0, 2.0, 3.0]])


rates = st.lists(st.lists(st.floats(0.0, 100.0), min_size=8, max_size=8), min_size=1, max_size=5)


@given(rates, st.integers(1, 4), st.integers(0, 4))
def test_every_setting_runs_the_same_seeds_in_order(table: list[list[float]], least: int, more: int) -> None:
    asked: list[tuple[int, int]] = []

    def capacity(number: int, seed: int) -> float:
        asked.append((number, seed))
        return table[number][seed]

    found = compare(capacity, len(table), least=least, most=least + more)
    assert len(set(asked)) == len(asked)
    for number, own in enumerate(found.rates):
        assert own == table[number][: len(own)]
        assert least <= len(own) <= least + more
    assert found.verdicts[found.leader] == "best"
    assert found.differences[found.leader].mean == 0.0
    order = found.order(lambda number: number)
    assert sorted(order) == list(range(len(table)))
    apart = [found.verdicts[number] == "less" for number in order]
    assert apart == sorted(apart)


def test_the_simpler_of_a_tie_comes_first_if_it_is_hardly_behind() -> None:
    def found(mean: float) -> Comparison:
        differences = [Difference(0.0, 0.0, 6), Difference(mean, 3.0, 6), Difference(5.0, 0.1, 6)]
        return Comparison([[10.0], [10.0 - mean], [5.0]], 0, differences, ["best", "tie", "less"])

    assert found(0.1).order(lambda number: -number) == [1, 0, 2]
    assert found(0.1).order(lambda number: number) == [0, 1, 2]
    assert found(1.0).order(lambda number: -number) == [0, 1, 2]
