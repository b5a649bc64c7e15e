"""The predicted cost of decodes and chunks, and the longest chunk that fits into a time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.runtime.core.features import Features
from gapless.runtime.scheduler.learned.linear_cost import TOKENS_FOR_TIME, UNBOUNDED, LinearCost

WEIGHTS = st.tuples(
    *[
        st.floats(low, high)
        for low, high in (
            (0, 5e-3),
            (1e-7, 1e-4),
            (0, 1e-8),
            (0, 1e-8),
            (0, 1e-7),
            (0, 1e-4),
        )
    ]
)


@given(weights=WEIGHTS, seconds=st.floats(1e-4, 1.0), prefix=st.integers(0, 100_000))
def test_the_longest_chunk_fits_and_a_longer_one_does_not(
    weights: tuple[float, ...], seconds: float, prefix: int
) -> None:
    cost = LinearCost(weights)
    length = cost.longest_chunk(seconds, prefix)
    assert cost.of_chunk(length, prefix) <= seconds * (1 + 1e-6)
    assert cost.of_chunk(length + 1, prefix) > seconds * (1 - 1e-6)


@given(weights=WEIGHTS, decodes=st.integers(0, 64), context=st.integers(0, 10_000), chunk=st.integers(0, 2048))
def test_decodes_and_a_chunk_add_up_to_the_micro_batch(
    weights: tuple[float, ...], decodes: int, context: int, chunk: int
) -> None:
    cost, prefix = LinearCost(weights), 300
    row = Features(1.0, decodes + chunk, chunk * prefix, chunk * chunk, context, decodes)
    assert cost.of(row) == pytest.approx(cost.of_decodes(decodes, context) + cost.of_chunk(chunk, prefix))


def test_without_time_no_chunk_and_without_cost_no_bound() -> None:
    assert LinearCost(TOKENS_FOR_TIME).longest_chunk(0.0, 0) == 0
    assert LinearCost(TOKENS_FOR_TIME).longest_chunk(256.0, 5_000) == 256
    assert LinearCost(Features(1.0, 0.0, 0.0, 0.0, 0.0, 0.0)).longest_chunk(1.0, 0) == UNBOUNDED
