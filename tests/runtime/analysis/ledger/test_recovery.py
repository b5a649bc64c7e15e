"""Idle time while a failed pipeline is repaired: which intervals it takes, whole and counted piece by piece."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import pytest

from gapless.runtime.analysis.ledger.causes import BUBBLES, CAUSES, STARVED, Cause
from gapless.runtime.analysis.ledger.fleet import Fleet
from gapless.runtime.analysis.ledger.ledger import Ledger
from gapless.runtime.analysis.ledger.recovery import down_seconds, name_recovery, replay_seconds, with_waits_of_dropped
from gapless.runtime.analysis.ledger.running_ledger import RunningLedger
from gapless.runtime.analysis.ledger.running_totals import RunningTotals
from gapless.runtime.analysis.ledger.summary import summarize
from gapless.runtime.core.messages import Span
from gapless.runtime.core.request_record import RequestRecord
from gapless.runtime.core.run_record import DecodesRecord, FaultRecord, MicroBatchRecord, RunRecord, SegmentRecord, Wait
from tests.support.idle_intervals import idle_of

STAGES, DEPTH = 3, 4


def fault(since: float, up: float | None, epoch: int = 1) -> FaultRecord:
    return FaultRecord(epoch, "process", "rank 1 ended", since, since + 0.1, up, {"start": 1.0}, [1], 2, 30)


def micro_batch(number: int, *waits: Wait, dispatched: float = 0.0, completed: float | None = None) -> MicroBatchRecord:
    segment = SegmentRecord(number, 0, 8)
    return MicroBatchRecord(number, dispatched, [segment], DecodesRecord.at(), list(waits), completed)


def pieces(ledger: Ledger, stage: int) -> list[tuple[float, float, str]]:
    return [(piece.start, piece.end, str(piece.cause)) for piece in idle_of(ledger) if piece.stage == stage]


def test_waits_before_what_was_dropped_are_before_the_next_unless_stage_0_computed_it() -> None:
    first, second, third = (Wait(float(n), n + 0.5, "no_request") for n in range(3))
    record = RunRecord(2, 10, faults=[fault(5.0, 8.0)])
    record.micro_batches = [
        micro_batch(0, first, dispatched=3.0),
        micro_batch(1, second, dispatched=5.05),  # before the fault was noticed
        micro_batch(2, third, dispatched=9.0, completed=11.0),
    ]
    assert [each.waits for each in with_waits_of_dropped(record)] == [[first], [first, second], [first, second, third]]
    record.spans = [Span(1, 0, 4, 4, 4, 5, 5)]
    assert [each.waits for each in with_waits_of_dropped(record)] == [[first], [first, second], [third]]


def test_the_time_of_a_fault_is_recovery_on_every_stage() -> None:
    """A request came at 4, its micro-batch was lost, and again at 9. The stages computed from 0 to 2 before that."""
    record = RunRecord(2, 10, faults=[fault(5.0, 8.0)])
    record.micro_batches = [
        micro_batch(0, completed=2.0),
        micro_batch(1, Wait(1.0, 4.0, "no_request"), dispatched=4.5),
        micro_batch(2, Wait(5.0, 8.0, "recovery"), dispatched=9.0, completed=11.0),
    ]
    record.spans = [Span(0, 0, 0, 0, 0, 1, 1), Span(0, 1, 1, 1, 1, 2, 2)]
    record.spans += [Span(2, 0, 9, 9, 9, 10, 10), Span(2, 1, 10, 10, 10, 11, 11)]
    ledger = Ledger(record)
    ledger.check()
    assert pieces(ledger, 0) == [
        (1.0, 4.0, "starved_no_request"),
        (4.0, 5.0, "control"),
        (5.0, 8.0, "recovery"),
        (8.0, 9.0, "control"),
        (10.0, 11.0, "fill_drain"),
    ]
    assert (5.0, 8.0, "recovery") in pieces(ledger, 1)
    assert ledger.seconds_by_cause(1)[Cause.RECOVERY] == 3.0
    assert summarize(Fleet([record], ledgers=[ledger]))["bubble_seconds"]["recovery"] == 6.0


def test_a_fault_without_repair_lasts_to_the_end_of_the_run() -> None:
    record = RunRecord(2, 10, [micro_batch(0), micro_batch(1)], faults=[fault(3.0, None)])
    record.spans = [Span(0, 0, 0, 0, 0, 2, 2), Span(1, 0, 2, 2, 2, 7, 7), Span(0, 1, 2, 2, 2, 4, 4)]
    ledger = Ledger(record)
    ledger.check()
    assert pieces(ledger, 1) == [(0.0, 2.0, "fill_drain"), (4.0, 7.0, "recovery")]
    assert ledger.busy_seconds(0) == 7.0  # compute that a fault overlaps stays compute


def test_without_faults_nothing_is_touched() -> None:
    record = random_run(0, epochs=1)
    columns = Ledger(record).idle_columns
    assert all(one is other for one, other in zip(name_recovery(columns, []), columns, strict=True))


def test_down_seconds_count_overlapping_faults_once() -> None:
    faults = [fault(1.0, 4.0), fault(3.0, 5.0), fault(8.0, None)]
    assert down_seconds(faults, 10.0) == 6.0
    assert down_seconds(faults, 2.0) == 1.0
    assert down_seconds([], 2.0) == 0.0


def test_replay_is_the_time_of_tokens_that_had_been_computed_before() -> None:
    """Request 0 decodes, 1 is within its prompt, 2 begins after the first fault; the second comes during the replay."""
    record = RunRecord(2, 10, faults=[fault(1.0, 2.0), fault(5.0, 6.0, epoch=2)])

    def computed(number: int, at: float, chunks: list[tuple[int, int, int]], decodes: list[int]) -> None:
        segments = [SegmentRecord(*chunk) for chunk in chunks]
        record.micro_batches.append(
            MicroBatchRecord(number, at, segments, DecodesRecord.at(decodes, [9] * len(decodes)), [], at + 0.3)
        )
        record.spans += [Span(number, stage, at, at, at, at + 0.1 + 0.2 * stage, at) for stage in range(2)]

    computed(0, 0.1, [(0, 0, 6)], [])
    computed(1, 0.5, [(1, 0, 8)], [0])
    computed(2, 3.0, [(0, 0, 8), (2, 0, 8)], [])  # the half of it is again, of the first fault
    computed(3, 4.0, [(1, 0, 4)], [0])  # four fifths
    computed(4, 7.0, [(1, 0, 16)], [])  # the second fault's: 8 of 16 tokens that it had before the first
    computed(5, 8.0, [(2, 0, 8), (0, 0, 9), (5, 0, 3)], [])  # 17 of 20
    computed(6, 9.0, [(0, 0, 9)], [])  # behind nothing any more: preempted
    assert replay_seconds(record) == pytest.approx([0.2 * (1 / 2 + 4 / 5), 0.2 * (1 / 2 + 17 / 20)])
    record.faults.clear()
    assert replay_seconds(record) == []


def test_recovery_is_a_group_of_its_own() -> None:
    assert set(CAUSES) == {*BUBBLES, *STARVED, Cause.UNKNOWN, Cause.RECOVERY, Cause.FILL_DRAIN}


def random_run(seed: int, epochs: int = 4) -> RunRecord:
    """Simulate a pipeline that fails once an epoch.

    Then what is in flight is lost, on some stages after its computation.
    """
    rng = random.Random(seed)
    record = RunRecord(STAGES, 100, batch=1, depth=DEPTH)
    clock, number = 0.0, 0
    free = [0.0] * STAGES
    done: list[float] = []
    for epoch in range(epochs):
        count = rng.choice([0, 1, 5, 30])
        is_last = epoch == epochs - 1
        for place in range(count + DEPTH):
            waits = []
            if not done and epoch:
                waits.append(Wait(record.faults[-1].since, clock, "recovery"))
            if rng.random() < 0.3:
                waits.append(Wait(clock, clock + rng.random(), "in_flight"))
                clock = waits[-1].end
            if len(done) >= DEPTH and done[-DEPTH] > clock:
                waits.append(Wait(clock, done[-DEPTH], "depth_full"))
                clock = done[-DEPTH]
            clock = there = clock + 0.01
            lost_from = STAGES if place < count or is_last else rng.randint(0, STAGES - 1)
            for stage in range(STAGES):
                begin = max(there, free[stage])
                there = free[stage] = begin + rng.random()
                if stage < lost_from:
                    record.spans.append(Span(number, stage, begin, begin, begin, there, there))
            done.append(there)
            record.micro_batches.append(micro_batch(number, *waits, dispatched=clock))
            if lost_from == STAGES:
                record.micro_batches[-1].completed = there
                if place == count - 1 and epoch % 2 and not is_last:  # a span of it came too late
                    record.spans = [s for s in record.spans if (s.micro_batch, s.stage) != (number, 1)]
                record.requests.append(RequestRecord(number, 8, waits[0].start if waits else clock, [there]))
                record.requests[-1].finished, record.requests[-1].finish_reason = there, "length"
            number += 1
        if not is_last:
            since = max([clock, *free])
            clock = since + 1.0 + rng.random()
            record.faults.append(FaultRecord(epoch + 1, "hang", "stage 1 is silent", since, since + 0.5, clock))
            free, done = [clock] * STAGES, []
    record.spans.sort(key=lambda span: (span.end, span.stage))
    return record


def in_parts(whole: RunRecord, rng: random.Random) -> Iterator[RunRecord]:
    """One record to which is added what is there at later and later times."""
    record = RunRecord(whole.num_stages, whole.num_blocks, batch=whole.batch, depth=whole.depth)
    ends = [span.end for span in whole.spans]
    before = -1.0
    for now in [*sorted(rng.sample(ends, len(ends) // 6)), math.inf]:
        record.micro_batches += [m for m in whole.micro_batches if before < m.dispatched <= now]
        record.spans += [span for span in whole.spans if before < span.end <= now]
        record.faults += [fault for fault in whole.faults if before < fault.detected <= now]
        before = now
        yield record


def test_the_summary_has_each_fault() -> None:
    whole = random_run(3)
    ledger = Ledger(whole)
    summary = summarize(Fleet([whole], ledgers=[ledger]))
    assert [found["reason"] for found in summary["faults"]] == ["hang"] * 3
    for found, known in zip(summary["faults"], whole.faults, strict=True):
        assert found["time"] == pytest.approx(known.since - ledger.t0)
        assert found["seconds"] == known.seconds
        assert found["parts"] == {"detect": pytest.approx(0.5)}
    assert summary["recovery_seconds"] == pytest.approx(sum(known.up - known.since for known in whole.faults))
    fleet = summarize(Fleet([whole, random_run(4)]))
    assert len(fleet["faults"]) == 6
    assert fleet["recovery_seconds"] > summary["recovery_seconds"]


@pytest.mark.parametrize("seed", range(12))
def test_counted_in_pieces_it_is_the_same(seed: int) -> None:
    whole = random_run(seed)
    expected = Ledger(whole)
    expected.check()
    counted, most = RunningLedger(DEPTH), 0
    for record in in_parts(whole, random.Random(seed)):
        counted.count(record)
        counted.drop(record)
        most = max(most, len(record.micro_batches))
    assert most < len(whole.micro_batches) or len(whole.micro_batches) < 60
    assert counted.start == expected.t0
    for stage in range(STAGES):
        assert counted.busy[stage] == pytest.approx(expected.busy_seconds(stage))
        lost = expected.seconds_by_cause(stage)
        lost[Cause.FILL_DRAIN] -= counted.end - counted.ends[stage]
        assert counted.idle[stage] == pytest.approx(list(lost.values()), abs=1e-9)
        assert lost[Cause.RECOVERY] > 3.0


@pytest.mark.parametrize("seed", range(4))
def test_the_summary_in_pieces_is_the_same(seed: int) -> None:
    whole = random_run(seed)
    expected = summarize(Fleet([whole]))
    totals = RunningTotals(DEPTH)
    for record in in_parts(whole, random.Random(seed)):
        totals.take(record)
    record.requests = whole.requests
    found = totals.summary(record)
    for key in (
        "bubble_seconds",
        "stage_busy_fraction",
        "micro_batches",
        "bubble_fraction",
        "cv_stage_time",
        "recovery_seconds",
    ):
        assert found[key] == pytest.approx(expected[key]), key
    assert len(found["faults"]) == len(expected["faults"]) == 3
