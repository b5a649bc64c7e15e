"""Clients of streams: when tokens came is noted by token, of the real server and where events hold several."""

from __future__ import annotations

import itertools

import pytest

from benchmarks.against_vllm_server import Load, measure, same_share
from benchmarks.support.server import gapless_server
from benchmarks.support.streams import Stream, note, stream_all


@pytest.mark.slow
def test_each_token_of_the_server_has_its_time():
    with gapless_server([]) as server:
        streams = stream_all(server, [[10, 20, 30], [40, 50]], 6, [0.0, 0.2])
        assert server.gauge("num_requests_running") == 0
        (refused,) = stream_all(server, [[10**6]], 6, [0.0])
        again = Load(3, 8, 4).run(server, "some", 50.0)
        assert same_share(again, Load(3, 8, 4).run(server, "some", None)) == 1.0
    for stream in streams:
        assert stream.error == ""
        assert len(stream.token_ids) == len(stream.token_times) == 6
        assert stream.due < stream.token_times[0]
        assert all(before <= after for before, after in itertools.pairwise(stream.token_times))
    assert " 400 " in refused.error
    assert "token id" in refused.error
    assert again[0].due < again[1].due < again[2].due


def test_tokens_of_one_event_came_at_once():
    stream = Stream(due=1.0)
    one, two = (b'data: {"choices": [{"token_ids": %s}]}' % ids for ids in (b"[7]", b"[8, 9]"))
    note(stream, [(1.5, one), (2.0, two)], 4)
    assert (stream.token_ids, stream.ttft, stream.gaps) == ([7, 8, 9], 0.5, [0.5, 0.0])
    assert "3 tokens instead of 4" in stream.error


def test_goodput_counts_the_requests_that_met_both_bounds():
    quick = Stream(0.0, [0.1, 0.12, 0.14], [1, 2, 3])
    late = Stream(0.5, [1.5, 1.51, 1.52], [1, 2, 3])
    stalled = Stream(1.0, [1.1, 1.2, 2.0], [1, 2, 4])
    found = measure([quick, late, stalled], ttft_ms=500, tbt_ms=50)
    assert found["requests_per_s"] == pytest.approx(1.5)
    assert found["goodput_per_s"] == pytest.approx(0.5)
    assert found["good_share"] == pytest.approx(1 / 3)
    assert found["p50_ttft_ms"] == pytest.approx(100)
    assert found["p50_tbt_ms"] == pytest.approx(20)
    assert found["output_tokens_per_s"] == pytest.approx(4.5)
    assert same_share([quick, late], [stalled, late]) == 0.5
