"""Chunks of a long prompt: equal in predicted time, without a tiny tail."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from gapless.runtime.scheduler.learned.linear_cost import LinearCost
from gapless.runtime.scheduler.learned.long_prompt import chunk_count, next_chunk

per_token, per_prefix = st.floats(1e-6, 1e-3), st.floats(1e-11, 1e-8)


@given(per_token, per_prefix, st.integers(20_000, 200_000), st.integers(20, 200), st.booleans())
def test_chunks_take_the_same_time_and_shrink(a: float, b: float, tokens: int, count: int, at_most: bool) -> None:
    cost = LinearCost((1e-3, a, b, b / 2, 0.0, 0.0))
    seconds = cost.of_tokens(0, tokens) / (count + 0.4)
    lengths, prefix = [], 0
    while prefix < tokens:
        lengths.append(next_chunk(cost, prefix, tokens - prefix, seconds, at_most))
        prefix += lengths[-1]
    assert prefix == tokens
    assert abs(len(lengths) - count) <= 4  # what is cut to whole tokens adds up
    assert all(later <= earlier + 2 for earlier, later in pairwise(lengths))
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    times = [cost.of_chunk(length, start) for length, start in zip(lengths, starts, strict=True)]
    a_token = a + b * tokens
    assert len(lengths) != count or max(times) - min(times) <= 8 * a_token
    assert not at_most or max(times) <= seconds + a_token


@given(st.floats(1e-2, 1e2), st.floats(1e-4, 1e-1), st.integers(1, 16))
def test_no_other_number_of_chunks_is_clearly_better(seconds: float, overhead: float, stages: int) -> None:
    def ttft(count: float) -> float:
        return (count + stages - 1) * (seconds / count + overhead)

    count = chunk_count(seconds, overhead, stages)
    for factor in (0.25, 0.5, 0.8, 1.25, 2.0, 4.0):
        if count * factor >= 1:
            assert ttft(count) <= 1.05 * ttft(count * factor)
