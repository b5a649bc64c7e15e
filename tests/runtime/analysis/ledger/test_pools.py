"""The two halves of a request join on the fleet's clock, whatever the clock of each replica."""

from __future__ import annotations

import pytest

from gapless.runtime.analysis.ledger.ledger import Ledger
from gapless.runtime.analysis.ledger.pools import JoinedRequest, join_pools
from gapless.runtime.core.request_record import RequestRecord
from gapless.runtime.core.run_record import DecodesRecord, MicroBatchRecord, RunRecord, SegmentRecord, Wait
from tests.support.hand_made import span


def joined() -> tuple[JoinedRequest, JoinedRequest]:
    """Two requests: replica 0, on a clock at 100 s, prefills both; replica 1, at 7 s, gets the second one's KV."""
    prefills = [
        MicroBatchRecord(0, 100.0, [SegmentRecord(4, 0, 8)], DecodesRecord.at()),
        MicroBatchRecord(1, 103.0, [SegmentRecord(9, 0, 8)], DecodesRecord.at(), [Wait(101.0, 103.0, "kv_full")]),
    ]
    first = RunRecord(1, 10, prefills, [span(0, 0, 100, 101), span(1, 0, 103, 104)])
    first.requests = [
        RequestRecord(9, 8, 101.0, [104.0], 103.0, 104.0, "length", preemptions=1, cached_tokens=3),
        RequestRecord(4, 8, 100.0, [101.0], 100.0, 101.0, "stop"),
    ]
    decodes = [
        MicroBatchRecord(0, 7.0, [], DecodesRecord.at([9], [8])),
        MicroBatchRecord(1, 9.0, [], DecodesRecord.at([9], [9]), [Wait(8.0, 9.0, "in_flight")]),
    ]
    second = RunRecord(1, 10, decodes, [span(0, 0, 7, 8), span(1, 0, 9, 10)])
    second.requests = [
        RequestRecord(9, 9, 7.0, [8.0, 10.0], 7.0, 10.0, "length", preemptions=2, kv_transfer=(6.0, 7.0))
    ]
    parts = [(first, Ledger(first)), (second, Ledger(second))]
    one, other = join_pools(parts, [2.0, 7.5], 1)  # the replicas began then
    return one, other


def test_times_are_of_the_fleet_s_clock() -> None:
    _, request = joined()
    record = request.record
    assert (record.arrival, record.first_dispatched, record.finished) == (3.0, 5.0, 10.5)
    assert record.token_times == [6.0, 8.5, 10.5]
    assert record.kv_transfer == (6.5, 7.5)
    assert request.kv_wait == pytest.approx(0.5)
    assert request.kv_transfer == pytest.approx(1.0)


def test_what_both_pools_count_is_added() -> None:
    one, other = joined()
    assert (one.record.request, one.prefill, one.decode, one.kv_wait, one.bubble) == (4, 0, None, None, 0.0)
    assert (other.record.request, other.prefill, other.decode) == (9, 0, 1)
    assert other.bubble == pytest.approx(2.0 + 1.0)
    assert (other.record.preemptions, other.record.cached_tokens, other.record.prompt_tokens) == (3, 3, 8)
