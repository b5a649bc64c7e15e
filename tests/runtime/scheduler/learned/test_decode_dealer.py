"""Decodes dealt by predicted time, and over how many micro-batches."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gapless.conf.sampling import SamplingParams
from gapless.runtime.core.request import Request
from gapless.runtime.scheduler.learned.decode_dealer import DecodeDealer, best_groups, round_seconds
from gapless.runtime.scheduler.learned.linear_cost import LinearCost

weights = st.tuples(
    st.floats(0, 1e-2), st.floats(1e-6, 1e-4), st.just(0.0), st.just(0.0), st.floats(0, 1e-7), st.floats(0, 1e-4)
)


def decode(number: int, context: int) -> Request:
    request = Request(number, b"\0" * context, SamplingParams(max_tokens=10))
    request.num_dispatched = request.num_completed = context
    return request


@given(weights, st.integers(1, 8), st.integers(1, 200), st.integers(1, 4000))
def test_equal_stages_have_a_micro_batch_each(
    stage: tuple[float, ...], stages: int, decodes: int, context: int
) -> None:
    costs = [LinearCost(stage)] * stages
    assert best_groups(costs, stages, stages, decodes, decodes * context) == stages


def test_what_takes_as_long_for_half_of_the_decodes_is_not_split_where_a_stage_is_slow_or_the_depth_too_great() -> None:
    fast, slow = (LinearCost((seconds, 1e-7, 0.0, 0.0, 0.0, 0.0)) for seconds in (1e-3, 3e-3))
    assert best_groups([fast, slow], 2, 2, 32, 32_000) == 1
    assert best_groups([fast] * 4, 8, 8, 64, 64_000) == 4
    by_token = LinearCost((0.0, 1e-4, 0.0, 0.0, 0.0, 0.0))
    assert best_groups([by_token, by_token], 2, 2, 32, 32_000) == 2


@given(st.lists(weights, min_size=1, max_size=6), st.integers(1, 8), st.integers(1, 8), st.integers(1, 100))
def test_no_number_is_clearly_better_than_the_one_that_is_chosen(
    stages: list[tuple[float, ...]], most: int, now: int, decodes: int
) -> None:
    costs = [LinearCost(stage) for stage in stages]
    chosen = best_groups(costs, most, min(now, most), decodes, 100 * decodes)
    found = round_seconds(costs, min(chosen, decodes), decodes, 100 * decodes)
    for groups in range(1, min(most, decodes) + 1):
        assert found <= 1.12 * round_seconds(costs, groups, decodes, 100 * decodes)


@given(
    weights,
    st.lists(st.integers(1, 50_000), min_size=1, max_size=60),
    st.integers(1, 8),
    st.none() | st.floats(1e-4, 1.0),
)
def test_every_decode_is_dealt_and_none_has_more_time_than_its_share_but_for_the_last(
    stage: tuple[float, ...], contexts: list[int], depth: int, seconds: float | None
) -> None:
    ready = [decode(number, context) for number, context in enumerate(contexts)]
    dealer, cost = DecodeDealer(depth), LinearCost(stage)
    count, left, idle, turn = len(ready), list(ready), 0, 0
    while left:
        dealer.survey(turn, ready, cost, [cost], 1)
        turn += 1
        taken = dealer.share(left, depth, count, 100, seconds)
        whole = stage[0] + dealer.mean * count / depth if seconds is None else seconds
        bound = dealer.mean + max(dealer.mean, dealer.mean * count / depth) + 0.03 * whole
        assert sum(dealer.seconds(r.num_dispatched) for r in left[: max(0, taken - 1)]) <= bound * (1 + 1e-6)
        idle = 0 if taken else idle + 1
        assert idle <= depth, "a decode waits for a round at most"
        left = left[taken:]


def test_a_long_context_rides_with_fewer() -> None:
    cost = LinearCost((1e-3, 1e-6, 0.0, 0.0, 1e-7, 0.0))
    ready = [decode(0, 30_000), *(decode(number, 1_000) for number in range(1, 31))]
    dealer = DecodeDealer(2)
    dealer.survey(0, ready, cost, [cost, cost], 1)
    assert dealer.share(ready, 2, 31, 100, None) == 1
    assert dealer.share(ready[1:], 2, 31, 100, None) == 30


def test_few_decodes_beside_a_chunk_stay_together_and_many_are_dealt() -> None:
    """One decode more or less hardly changes a micro-batch with a chunk, but one that is left waits for the next."""
    cost = LinearCost((1e-2, 1e-4, 0.0, 0.0, 0.0, 1e-4))
    dealer = DecodeDealer(2)
    few = [decode(number, 500) for number in range(8)]
    dealer.survey(0, few, cost, [cost, cost], 1)
    assert dealer.share(few[:6], 2, 8, 100, 0.05) == 6
    assert dealer.share(few[:6], 2, 8, 100, 0.005) == 4, "where they are much of the time, they are dealt"
    many = [decode(number, 500) for number in range(80)]
    dealer = DecodeDealer(2)
    dealer.survey(0, many, cost, [cost, cost], 1)
    assert dealer.share(many[:60], 2, 80, 100, 0.05) == 40
