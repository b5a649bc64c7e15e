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
    assert "serve.requests_per_minute=2 is used up. Please try again in 30.0s." in refused.value.message
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
    with pytest.raises(ApiError, match=r"tokens_per_minute=600 is used up\. Please try again in 30\.1s"):
        limits.admit("", 1)
    clock.now = 30.1
    limits.admit("", 10_000)  # more than a minute's worth: let in, and paid for
    clock.now = 60.0
    with pytest.raises(ApiError):
        limits.admit("", 1)


def test_without_limits_nothing_is_counted() -> None:
    limits = RateLimits()
    for _ in range(1000):
        limits.admit("", 10**6)
        limits.spend("", 10**6)


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
