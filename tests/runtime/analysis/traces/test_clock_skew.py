"""Clocks of ranks: the true offset lies within the bounds, and the bounds are as tight as the messages allow."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.runtime.analysis.traces.clock_skew import Order, fit_clocks
from gapless.runtime.core.micro_batch_columns import Floats
from tests.support.tiers import examples

LEAST = 20e-6  # seconds of the fastest message

seeds = st.integers(0, 2**32 - 1)


class Clock:
    """A clock that is `ahead` seconds ahead of true time."""

    def __init__(self, ahead: float) -> None:
        self.ahead = ahead

    def shows(self, true: Floats) -> Floats:
        return true + self.ahead


def sent(rng: np.random.Generator, clocks: list[Clock], first: int, second: int, count: int) -> Order:
    """Messages from `first` to `second` over ten seconds; some of them wait long for the receiver."""
    began = np.sort(rng.uniform(0.0, 10.0, count))
    ended = began + LEAST + rng.exponential(200e-6, count)
    return Order(first, second, clocks[first].shows(began), clocks[second].shows(ended))


@settings(max_examples=examples(60))
@given(seeds, st.floats(-0.5, 0.5), st.integers(1, 200), st.integers(1, 200))
def test_true_offset_lies_within_the_bounds(seed: int, ahead: float, out: int, back: int) -> None:
    rng, clocks = np.random.default_rng(seed), [Clock(0.3), Clock(0.3 + ahead)]
    fit = fit_clocks({0: "a", 1: "b"}, [sent(rng, clocks, 0, 1, out), sent(rng, clocks, 1, 0, back)])[1]
    assert fit.low - 1e-9 <= ahead <= fit.high + 1e-9
    assert fit.half_width is not None
    assert abs(fit.ahead - ahead) <= fit.half_width + 1e-9
    assert fit.pairs == out + back
    assert not fit.by_other_ranks


def test_bounds_are_tight_over_symmetric_links() -> None:
    """The fastest message of each direction leaves LEAST open on each side, and the middle is true."""
    began = np.arange(0.0, 1.0, 0.01)
    clocks = [Clock(0.0), Clock(-1.204e-3)]
    out = Order(0, 1, clocks[0].shows(began), clocks[1].shows(began + LEAST))
    back = Order(1, 0, clocks[1].shows(began), clocks[0].shows(began + LEAST))
    fit = fit_clocks({0: "a", 1: "b"}, [out, back])[1]
    assert fit.half_width == pytest.approx(LEAST, abs=1e-9)
    assert fit.ahead == pytest.approx(-1.204e-3, abs=1e-9)
    assert fit.text == "the clock of rank 1 is 1.204 ms ± 0.020 ms behind rank 0's, by 200 messages in both directions"
    known = [Order(o.first, o.second, o.before, o.after, LEAST) for o in (out, back)]
    assert fit_clocks({0: "a", 1: "b"}, known)[1].half_width == pytest.approx(0.0, abs=1e-9)


@settings(max_examples=examples(40))
@given(seeds, st.lists(st.floats(-0.2, 0.2), min_size=2, max_size=5))
def test_bounds_add_over_a_chain(seed: int, aheads: list[float]) -> None:
    rng, clocks = np.random.default_rng(seed), [Clock(0.0), *map(Clock, aheads)]
    orders = []
    for rank in range(len(aheads)):
        orders += [sent(rng, clocks, rank, rank + 1, 50), sent(rng, clocks, rank + 1, rank, 50)]
    fits = fit_clocks(dict.fromkeys(range(len(clocks)), ""), orders)
    widths = [fits[rank].half_width or 0.0 for rank in range(len(clocks))]
    assert widths == sorted(widths)
    for rank, ahead in enumerate(aheads, 1):
        assert fits[rank].low - 1e-9 <= ahead <= fits[rank].high + 1e-9
        assert fits[rank].by_other_ranks == (rank > 1)
    together = {rank: fits[rank].ahead for rank in range(len(clocks))}
    for order in orders:  # the offsets fit each other, not only rank 0's
        assert order.room.min() >= together[order.second] - together[order.first] - 1e-9


@settings(max_examples=examples(30))
@given(seeds, st.lists(st.floats(-0.2, 0.2), min_size=1, max_size=4))
def test_collectives_bound_all_ranks_from_both_sides(seed: int, aheads: list[float]) -> None:
    """All leave within microseconds of each other, and in turn each is the last to enter."""
    rng, clocks = np.random.default_rng(seed), [Clock(0.0), *map(Clock, aheads)]
    entered = np.arange(40)[:, None] * 0.1 + rng.uniform(0.0, 1e-3, (40, len(clocks)))
    left = entered.max(axis=1, keepdims=True) + LEAST + rng.uniform(0.0, 5e-6, entered.shape)
    shown = [np.stack([c.shows(times[:, i]) for i, c in enumerate(clocks)], axis=1) for times in (entered, left)]
    pairs = permutations(range(len(clocks)), 2)  # no rank leaves before every other has entered
    orders = [Order(a, b, shown[0][:, a], shown[1][:, b]) for a, b in pairs]
    fits = fit_clocks(dict.fromkeys(range(len(clocks)), ""), orders)
    for rank, ahead in enumerate(aheads, 1):
        assert fits[rank].low - 1e-9 <= ahead <= fits[rank].high + 1e-9
        assert fits[rank].half_width is not None
        assert fits[rank].half_width <= 1e-3


def test_messages_one_way_bound_one_side() -> None:
    began = np.arange(0.0, 1.0, 0.01)
    late, early = Order(0, 1, began, began + 310e-6), Order(0, 1, began, began - 2e-3)
    fit = fit_clocks({0: "a", 1: "b"}, [late])[1]
    assert (fit.ahead, fit.half_width, fit.low) == (pytest.approx(310e-6), None, -np.inf)
    assert fit.text == (
        "the clock of rank 1 is at most 0.310 ms ahead of rank 0's, by 100 messages in one direction only; "
        "this bound is used, as if the fastest took no time"
    )
    fit = fit_clocks({0: "a", 1: "b"}, [early])[1]
    assert fit.ahead == pytest.approx(-2e-3)
    assert fit.text.startswith("the clock of rank 1 is at least 2.000 ms behind")
    reverse = fit_clocks({0: "a", 1: "b"}, [Order(1, 0, began, began + 310e-6)])[1]
    assert reverse.ahead == pytest.approx(-310e-6)
    assert reverse.text.startswith("the clock of rank 1 is at most 0.310 ms behind")


def test_ranks_of_one_host_share_a_clock() -> None:
    began = np.arange(0.0, 1.0, 0.01)
    orders = [Order(0, 1, began, began - 1e-3), Order(1, 2, began, began + LEAST), Order(2, 0, began, began + LEAST)]
    fits = fit_clocks({0: "node1", 1: "node1", 2: "node2"}, orders)
    assert fits[1].ahead == 0.0
    assert fits[1].half_width == 0.0
    assert fits[1].text == "ranks 0 and 1 share a clock: their offset is 0"
    assert fits[2].half_width == pytest.approx(LEAST)


def test_what_no_offset_explains_is_said() -> None:
    """Messages that were matched wrongly: two at one time contradict each other, whatever the clocks do."""
    at = np.array([1.0, 2.0])
    fit = fit_clocks({0: "a", 1: "b"}, [Order(0, 1, at, at - 5e-3), Order(1, 0, at, at - 5e-3)])[1]
    assert fit.contradiction == pytest.approx(10e-3, rel=1e-3)
    assert "no offset from rank 0's fits all 4 messages" in fit.text
    assert "at most 5.000 ms unexplained" in fit.text


def test_rank_without_messages() -> None:
    fit = fit_clocks({0: "a", 3: "b"}, [])[3]
    assert fit.text == "the clock of rank 3: no message bounds its offset from rank 0's; times are as recorded"
