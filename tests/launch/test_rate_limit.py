"""What an API key may ask for in a minute."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.launch.server.errors import ApiError
from gapless.launch.server.rate_limit import RateLimits


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_requests_fill_up_evenly_and_each_key_has_its_own() -> None:
    clock = Clock()
    limits = RateLimits(2, None, clock)
    for holder in ("key 0", "key 1"):
        limits.admit(holder, 10)
        limits.admit(holder, 10)
    with pytest.raises(ApiError) as refused:
        limits.admit("key 0", 10)
    assert (refused.value.status, refused.value.code) == (429, "rate_limit_exceeded")
    assert refused.value.headers == {"retry-after": "30"}
    assert "serve.requests_per_minute=2 is exhausted. Please try again in 30.0s." in refused.value.message
    clock.now = 29.0
    with pytest.raises(ApiError):
        limits.admit("key 0", 10)
    clock.now = 30.0
    limits.admit("key 0", 10)


def test_a_long_output_overdraws_and_the_next_request_waits_for_it() -> None:
    clock = Clock()
    limits = RateLimits(None, 600, clock)
    limits.admit("", 100)
    limits.spend("", 800)
    with pytest.raises(ApiError, match=r"tokens_per_minute=600 is exhausted\. Please try again in 30\.1s"):
        limits.admit("", 1)
    clock.now = 30.1
    limits.admit("", 10_000)  # more than a minute's worth: let in, and all of it paid for
    with pytest.raises(ApiError, match=r"try again in 1000\.0s"):
        limits.admit("", 1)
    clock.now += 999.9
    with pytest.raises(ApiError):
        limits.admit("", 1)
    clock.now += 0.1
    limits.admit("", 1)


def test_without_limits_nothing_is_counted() -> None:
    limits = RateLimits()
    for _ in range(1000):
        limits.admit("", 10**6)
        limits.spend("", 10**6)


@given(
    now=st.floats(0, 1e6),
    requests=st.none() | st.integers(1, 100),
    tokens=st.none() | st.integers(1, 1000),
    sizes=st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 5000)), min_size=2, max_size=8),
)
def test_who_waits_as_long_as_told_is_let_in_whatever_the_size(
    now: float, requests: int | None, tokens: int | None, sizes: list[tuple[int, int]]
) -> None:
    clock = Clock()
    clock.now = now
    limits = RateLimits(requests, tokens, clock)
    for prompt, output in sizes:
        for _ in range(3 - [requests, tokens].count(None)):  # each limit may refuse once
            try:
                limits.admit("", prompt)
            except ApiError as refused:
                clock.now += int((refused.headers or {})["retry-after"])
            else:
                break
        else:
            pytest.fail("refused again after the wait that it was told")
        limits.spend("", output)


def test_a_key_that_rests_saves_up_one_minute_s_worth() -> None:
    clock = Clock()
    limits = RateLimits(3, None, clock)
    limits.admit("", 1)
    clock.now = 3600.0
    for _ in range(3):
        limits.admit("", 1)
    with pytest.raises(ApiError):
        limits.admit("", 1)


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(1, 50), st.integers(0, 50)), max_size=60))
def test_no_more_than_the_limit_goes_through(steps: list[tuple[float, int, int]]) -> None:
    clock = Clock()
    limits = RateLimits(6, 120, clock)
    admitted = tokens = 0
    for wait, prompt, output in steps:
        clock.now += wait
        try:
            limits.admit("", prompt)
        except ApiError:
            continue
        limits.spend("", output)
        admitted, tokens = admitted + 1, tokens + prompt + output
        assert admitted <= 6 + clock.now * 6 / 60 + 1e-6
        assert tokens <= 120 + clock.now * 120 / 60 + 100 + 1e-6  # the last one may overdraw
