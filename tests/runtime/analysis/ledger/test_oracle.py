"""The ledger against an oracle that applies its rule to one instant at a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from gapless import LLM, SamplingParams
from gapless.parallel.placement import StageLink
from gapless.runtime.analysis.ledger.causes import Cause
from gapless.runtime.analysis.ledger.ledger import Ledger
from gapless.runtime.analysis.run_folder.read import read_run_folder
from gapless.runtime.core.messages import Span
from gapless.runtime.core.request_record import RequestRecord
from gapless.runtime.core.run_record import DecodesRecord, FaultRecord, MicroBatchRecord, RunRecord, SegmentRecord, Wait
from gapless.runtime.scheduler.policies import POLICIES
from gapless.runtime.simulation.pipeline.simulated_pipeline import Disturbance
from tests.support.idle_intervals import IdleInterval, idle_of
from tests.support.simulated_parts import Device, items, make_replica, run
from tests.support.tiers import examples

from .oracle import Oracle

ticks = st.integers(0, 4)  # whole seconds, so that both compute without rounding


def seconds_apart(record: RunRecord) -> float:
    """Seconds, over all stages, to which the ledger and the oracle give different causes."""
    by_ledger, by_oracle = by_gap(idle_of(Ledger(record))), by_gap(Oracle(record).idle())
    apart = 0.0
    for gap in by_ledger.keys() | by_oracle.keys():
        pieces = by_ledger[gap] + by_oracle[gap]
        for start, end in pairwise(sorted({t for piece in pieces for t in (piece.start, piece.end)})):
            middle = (start + end) / 2
            apart += (end - start) * (causes(by_ledger[gap], middle) != causes(by_oracle[gap], middle))
    return apart


def by_gap(idle: list[IdleInterval]) -> defaultdict[tuple[int, int | None], list[IdleInterval]]:
    gaps = defaultdict(list)
    for piece in idle:
        gaps[piece.stage, piece.micro_batch].append(piece)
    return gaps


def causes(pieces: Iterable[IdleInterval], t: float) -> list[Cause]:
    return [piece.cause for piece in pieces if piece.start <= t < piece.end]


@st.composite
def runs(draw: st.DrawFn) -> RunRecord:
    """Draw a run, first in, first out, with any stage times, transports, delays of sends and waits of the coordinator.

    Clocks may be skewed and spans may be lost.
    """
    num_stages, depth = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    record = RunRecord(num_stages, 100, requests=[RequestRecord(0, 8, -float(draw(ticks)))])
    free, done, clock = [0.0] * num_stages, [], 0.0
    for number in range(draw(st.integers(1, 7))):
        tokens, num_decodes = draw(st.sampled_from([0, 0, 4, 8])), draw(st.integers(0, 2))
        starts = [draw(st.integers(3, 4)) for _ in range(num_decodes)]
        waits = []
        for reason in draw(st.lists(st.sampled_from(["no_request", "in_flight", "kv_full"]), max_size=2)):
            clock += draw(ticks)
            waits.append(Wait(clock, clock + draw(ticks), reason))
            clock = waits[-1].end
        if number >= depth and done[number - depth] > clock:
            arrival = clock + draw(ticks)  # interrupts the wait for a slot
            if clock < arrival < done[number - depth]:
                waits.append(Wait(clock, arrival, "depth_full"))
                clock = arrival + draw(st.sampled_from([0.0, 0.5]))
            waits.append(Wait(clock, done[number - depth], "depth_full"))
            clock = done[number - depth]
        clock = there = clock + draw(ticks)
        chunks = [SegmentRecord(0, 0, tokens)] if tokens else []
        record.micro_batches.append(
            MicroBatchRecord(number, clock, chunks, DecodesRecord.at(range(1, 1 + num_decodes), starts), waits)
        )
        for stage in range(num_stages):
            begin = max(there, free[stage])
            end = begin + draw(ticks) + (stage == num_stages - 1)  # no two micro-batches leave at once
            sent = end + draw(st.sampled_from([0, 0, 0, 1, 3]))
            free[stage] = draw(st.sampled_from([end, sent]))
            record.spans.append(Span(number, stage, there, there, begin, end, sent))
            there = end + draw(st.integers(0, 2))
        done.append(end)
    if draw(st.booleans()):
        ahead = [draw(st.integers(-3, 3)) for _ in range(num_stages - 1)] + [0]
        record.spans = [skewed(span, ahead[span.stage]) for span in record.spans]
    if draw(st.booleans()):
        lost = draw(st.sets(st.integers(0, len(record.spans) - 1), max_size=3))
        record.spans = [span for i, span in enumerate(record.spans) if i not in lost]
    return record


def skewed(span: Span, ahead: float) -> Span:
    times = (t + ahead for t in (span.ready, span.input, span.begin, span.end, span.sent))
    return Span(span.micro_batch, span.stage, *times)


@settings(max_examples=examples(600))
@given(runs())
def test_random_pipelines(record: RunRecord) -> None:
    assert seconds_apart(record) == 0.0


@st.composite
def failing(draw: st.DrawFn) -> RunRecord:
    """Draw a run with faults at any times, and micro-batches that never came to their last stages."""
    record = draw(runs())
    last = max([0.0, *(span.end for span in record.spans)])
    for epoch in range(draw(st.integers(1, 3))):
        since = draw(st.integers(-3, int(last) + 2)) + draw(st.sampled_from([0.0, 0.5]))
        detected = since + draw(ticks)
        up = draw(st.none() | st.integers(1, 6).map(lambda seconds, detected=detected: detected + seconds))
        record.faults.append(FaultRecord(epoch + 1, "process", "rank 0 ended", since, detected, up))
    lost = draw(st.dictionaries(st.integers(0, len(record.micro_batches) - 1), st.integers(0, 3), max_size=3))
    for number, micro_batch in enumerate(record.micro_batches):
        micro_batch.completed = None if number in lost else last
        if draw(st.integers(0, 3)) == 0:
            micro_batch.waits = [Wait(wait.start, wait.end, "recovery") for wait in micro_batch.waits]
    record.spans = [span for span in record.spans if span.stage < lost.get(span.micro_batch, record.num_stages)]
    return record


@settings(max_examples=examples(600))
@given(failing())
def test_random_faults(record: RunRecord) -> None:
    assert seconds_apart(record) == 0.0
    ledger = Ledger(record)
    ledger.check()
    without = Ledger(replace(record, faults=[]))
    assert [ledger.busy_seconds(stage) for stage in range(record.num_stages)] == [
        without.busy_seconds(stage) for stage in range(record.num_stages)
    ]
    times = {t for fault in record.faults for t in (fault.since, fault.up) if t is not None}
    for piece in idle_of(ledger):
        assert not any(piece.start < t < piece.end for t in times) or piece.cause is Cause.RECOVERY, piece
        middle = (piece.start + piece.end) / 2
        if any(fault.since <= middle and (fault.up is None or middle < fault.up) for fault in record.faults):
            assert piece.cause is Cause.RECOVERY, piece


@st.composite
def simulated(draw: st.DrawFn) -> RunRecord:
    stages = draw(st.integers(1, 4))
    replica = make_replica(
        draw(st.sampled_from(POLICIES)),
        layers=draw(st.lists(st.integers(1, 3), min_size=stages, max_size=stages)),
        devices=[Device(draw(st.sampled_from([1.0, 3.0]))) for _ in range(stages)],
        batch=draw(st.integers(1, 5)),
        depth=draw(st.none() | st.integers(1, 6)),
        num_blocks=draw(st.integers(30, 90)),
        stage_links=[StageLink(draw(st.booleans())) for _ in range(stages - 1)],
        overlap_sends=draw(st.booleans()),
        dispatch_s=draw(st.sampled_from([0.0, 0.002])),
        result_s=draw(st.sampled_from([0.0, 0.003])),
        disturbance=Disturbance(draw(st.sampled_from([0.0, 0.3])), 0.1, 4.0, seed=draw(st.integers(0, 99))),
    )
    requests = st.tuples(st.integers(1, 70), st.integers(1, 50), st.floats(0, 0.4))
    run(replica, items(*draw(st.lists(requests, min_size=1, max_size=10))))
    return replica.record


@settings(max_examples=examples(100))
@given(simulated())
def test_simulated_runs(record: RunRecord) -> None:
    assert seconds_apart(record) < 1e-6


def test_a_run_of_a_model() -> None:
    with LLM("tiny", **{"parallel.threads": 1, "scheduler.batch": 2, "cache.num_blocks": 60}) as llm:
        llm.generate(
            ["import os\n", "class Queue:\n    def put(self, item):\n        "] * 3, SamplingParams(max_tokens=6)
        )
        assert seconds_apart(llm.record) < 1e-6


def test_a_recorded_run_of_three_ranks() -> None:
    record = read_run_folder(Path(__file__).parent / "recorded_run").load()
    assert len(record.spans) == 3 * len(record.micro_batches) > 100
    assert seconds_apart(record) < 1e-6
