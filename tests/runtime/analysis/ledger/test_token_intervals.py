"""TTFTs and TBTs cut into parts: exact on simulated runs of any policy, with faults, drafts and pools; by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from gapless.runtime.analysis.ledger.token_intervals import Part, StagePart, TokenIntervals, stage_part
from gapless.runtime.core.latencies import time_to_first_token, tokens_apart
from gapless.runtime.core.messages import Span
from gapless.runtime.core.micro_batch_columns import Floats
from gapless.runtime.core.request_record import RequestRecord
from gapless.runtime.core.run_record import DecodesRecord, FaultRecord, MicroBatchRecord, RunRecord, SegmentRecord, Wait
from tests.runtime.simulation.pipeline.test_disaggregation import drawn, fleet_of, pools
from tests.runtime.simulation.pipeline.test_drafts import CheapRows, simulate
from tests.runtime.simulation.pipeline.test_faults import fleets, ran
from tests.support.closed_loops import loop
from tests.support.simulated_parts import items
from tests.support.tiers import examples

TOLERANCE = 1e-9  # seconds


def check(record: RunRecord) -> TokenIntervals:
    """Check what holds for the intervals of any run, and return them."""
    intervals = TokenIntervals(record)
    expected = [
        (r.request, token, seconds)
        for r in record.requests
        for token, seconds in enumerate([time_to_first_token(r), *tokens_apart(r)] if r.token_times else [])
    ]
    assert [(r, t) for r, t, _ in expected] == list(zip(intervals.request, intervals.token, strict=True))
    assert intervals.seconds == pytest.approx([seconds for *_, seconds in expected], abs=TOLERANCE)
    parts = all_parts(intervals)
    assert parts.shape == (len(expected), len(names_of(intervals)))
    assert (parts >= -TOLERANCE).all()
    assert np.abs(parts.sum(axis=1) - intervals.seconds).max(initial=0.0) <= TOLERANCE
    check_compute(record, intervals)
    return intervals


def check_compute(record: RunRecord, intervals: TokenIntervals) -> None:
    """Look up each interval's compute the slow way: that of the oldest micro-batch of the request, on each stage."""
    spans = {(s.micro_batch, s.stage): s for s in record.spans}
    carried: dict[int, list[MicroBatchRecord]] = {}
    for m in record.micro_batches:
        for request in {c.request for c in m.chunks} | set(m.decodes.distinct):
            if m.completed is not None:
                carried.setdefault(request, []).append(m)
    parts = all_parts(intervals)
    for i, request in enumerate(intervals.request.tolist()):
        at, end = intervals.start[i], intervals.end[i]
        seconds = np.zeros(record.num_stages)
        for m in carried.get(request, ()):
            assert m.completed is not None
            if at < m.completed <= end + TOLERANCE:
                for stage in range(record.num_stages):
                    if (span := spans.get((m.micro_batch, stage))) is not None:
                        seconds[stage] += max(0.0, min(span.end, m.completed) - max(span.begin, at))
                at = m.completed
        columns = [stage_part(StagePart.COMPUTE, stage) for stage in range(record.num_stages)]
        assert parts[i, columns] == pytest.approx(seconds, abs=1e-6), i


@settings(max_examples=examples(40))
@given(fleets())
def test_parts_sum_to_each_interval_of_any_run(fleet: dict[str, Any]) -> None:
    for replica in ran(fleet):
        intervals = check(replica.record)
        assert not all_parts(intervals)[:, Part.UNKNOWN].any()


@settings(max_examples=examples(15))
@given(fleets())
def test_without_faults_nothing_is_recovery(fleet: dict[str, Any]) -> None:
    for replica in ran(fleet, faults=[[] for _ in fleet["faults"]]):
        assert not all_parts(check(replica.record))[:, Part.RECOVERY].any()


@settings(max_examples=examples(15))
@given(drawn())
def test_a_request_of_two_pools_waits_for_its_kv_before_its_second_token(given_: dict[str, Any]) -> None:
    fleet = fleet_of(started := pools(**given_["pools"]))
    assert sum(started.run(items(*given_["requests"]), workload=loop(given_["most"])))
    for record in fleet.records:
        intervals = check(record)
        moved = {r.request: r.kv_transfer for r in record.requests if r.kv_transfer is not None}
        first = np.flatnonzero(intervals.token == 0)
        for i in first.tolist():
            request = int(intervals.request[i])
            assert intervals.is_ttft[i] == (request not in moved)
            if request in moved:
                begin, end = moved[request]
                least = min(end, intervals.end[i]) - max(begin, intervals.start[i])
                assert all_parts(intervals)[i, Part.KV_TRANSFER] >= least - TOLERANCE


def test_tokens_of_accepted_drafts_take_no_time() -> None:
    record = simulate("equal_time", CheapRows(), 0.9).record
    intervals = check(record)
    assert (intervals.seconds == 0.0).sum() > 100
    assert (intervals.micro_batch >= 0).all()


def by_hand() -> RunRecord:
    """Two stages. Request 0 is prefilled in two chunks and decodes once, behind the prompt of request 1.

    Micro-batch 0 is at stage 0 in [1, 2) and at stage 1 in [2.5, 4); 1 in [2, 4) and [4.5, 6); 2, the prompt of request
    1, in [4, 7) and [7, 9); 3, the decode, in [7, 8) and [9.25, 10).
    """
    record = RunRecord(2, 10)
    record.micro_batches = [
        MicroBatchRecord(0, 0.5, [SegmentRecord(0, 0, 8)], DecodesRecord.at(), [], 4.0),
        MicroBatchRecord(1, 0.75, [SegmentRecord(0, 8, 4)], DecodesRecord.at(), [], 6.25),
        MicroBatchRecord(
            2, 4.25, [SegmentRecord(1, 0, 9)], DecodesRecord.at(), [Wait(1.0, 4.0, "depth_full")], 9.0, num_waiting=0
        ),
        MicroBatchRecord(3, 6.5, [], DecodesRecord.at([0], [12]), [Wait(4.25, 6.0, "depth_full")], 10.5),
    ]
    stage_0 = [(0, 1.0, 2.0), (1, 2.0, 4.0), (2, 4.5, 7.0), (3, 7.0, 8.0)]
    stage_1 = [(0, 2.5, 4.0), (1, 4.5, 6.0), (2, 7.0, 9.0), (3, 9.25, 10.0)]
    for stage, spans in enumerate((stage_0, stage_1)):
        record.spans += [Span(number, stage, begin, begin, begin, end, end) for number, begin, end in spans]
    record.requests = [RequestRecord(0, 12, 0.0, [6.25, 10.5]), RequestRecord(1, 9, 1.0, [9.0])]
    return record


def names_of(intervals: TokenIntervals) -> list[str]:
    stages = [f"{part.name.lower()} {stage}" for stage in range(len(intervals.lanes)) for part in StagePart]
    return [part.name.lower() for part in Part] + stages


def all_parts(intervals: TokenIntervals) -> Floats:
    """Return the seconds of the parts of each interval, which sum to its length."""
    return intervals.table[intervals.row]


def parts_of(intervals: TokenIntervals, place: int) -> dict[str, float]:
    return {name: s for name, s in zip(names_of(intervals), all_parts(intervals)[place].tolist(), strict=True) if s}


def test_parts_by_hand() -> None:
    intervals = check(by_hand())
    assert list(intervals.micro_batch) == [1, 3, 2]
    # The first chunk until 4, then the second: its activation has come by 4.5, as it left stage 0 at 4.
    assert parts_of(intervals, 0) == {
        "control": 1.0,
        "compute 0": 1.0,
        "transport 1": 0.5 + 0.5,
        "compute 1": 1.5 + 1.5,
        "result": 0.25,
    }
    # The slot was free at 6, before the interval began. It waits for stage 0, then for stage 1, behind micro-batch 2.
    assert parts_of(intervals, 1) == {
        "control": 0.25,
        "wait 0": 0.5,
        "compute 0": 1.0,
        "wait 1": 1.0,
        "transport 1": 0.25,
        "compute 1": 0.75,
        "result": 0.5,
    }
    assert parts_of(intervals, 2) == {
        "queue": 3.0,
        "control": 0.25 + 0.25,
        "compute 0": 2.5,
        "compute 1": 2.0,
    }


def test_a_queue_without_a_chunk_since_the_last_dispatch_has_no_room() -> None:
    record = RunRecord(1, 10)
    record.micro_batches = [
        MicroBatchRecord(0, 0.0, [SegmentRecord(0, 0, 8)], DecodesRecord.at(), [], 1.0),
        MicroBatchRecord(1, 1.0, [], DecodesRecord.at([0], [8]), [Wait(0.0, 1.0, "depth_full")], 3.0, num_waiting=1),
        MicroBatchRecord(2, 3.0, [SegmentRecord(1, 0, 4)], DecodesRecord.at(), [Wait(1.0, 3.0, "depth_full")], 4.0),
    ]
    record.spans = [Span(n, 0, b, b, b, e, e) for n, b, e in ((0, 0.0, 1.0), (1, 1.0, 3.0), (2, 3.0, 4.0))]
    record.requests = [RequestRecord(0, 8, 0.0, [1.0, 3.0]), RequestRecord(1, 4, 0.5, [4.0])]
    intervals = check(record)
    assert parts_of(intervals, 2) == {"queue": 0.5, "no_room": 2.0, "compute 0": 1.0}


def test_what_a_fault_has_dropped_is_recovery_from_its_dispatch() -> None:
    record = RunRecord(1, 10, faults=[FaultRecord(1, "process", "rank 0 ended", 2.5, 2.6, 4.0)])
    record.micro_batches = [
        MicroBatchRecord(0, 0.0, [SegmentRecord(0, 0, 8)], DecodesRecord.at(), [], 1.0),
        MicroBatchRecord(1, 1.5, [], DecodesRecord.at([0], [8])),
        MicroBatchRecord(2, 4.25, [SegmentRecord(0, 0, 9)], DecodesRecord.at(), [Wait(2.5, 4.0, "recovery")], 6.0),
    ]
    record.spans = [Span(0, 0, 0, 0, 0, 1, 1), Span(2, 0, 4.25, 4.25, 4.25, 6, 6)]
    record.requests = [RequestRecord(0, 8, 0.0, [1.0, 6.0])]
    assert parts_of(check(record), 1) == {"control": 0.5 + 0.25, "recovery": 1.0 + 1.5, "compute 0": 1.75}


def test_a_token_that_no_micro_batch_brought_is_unknown() -> None:
    record = by_hand()
    record.requests[1].token_times.append(12.0)
    record.requests.append(RequestRecord(7, 9, 1.0, [2.0]))
    intervals = check(record)
    assert list(intervals.micro_batch) == [1, 3, 2, -1, -1]
    assert [parts_of(intervals, place) for place in (3, 4)] == [{"unknown": 3.0}, {"unknown": 1.0}]


def test_a_record_without_spans_or_requests() -> None:
    assert len(check(RunRecord(2, 10))) == 0
    record = by_hand()
    record.spans.clear()
    assert parts_of(check(record), 1) == {"control": 0.25, "result": 4.0}
