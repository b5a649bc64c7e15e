"""The engine's process, spoken to as the HTTP front does."""

from __future__ import annotations

import multiprocessing
import select
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import mean

import msgspec
import pytest

from gapless.conf.build import to_mapping
from gapless.conf.sampling import SamplingParams
from gapless.conf.schema import ServeConfig
from gapless.conf.structured_outputs import StructuredOutputs
from gapless.launch.compose import compose_one
from gapless.parallel.frames import DATA, FrameSocket
from gapless.runtime.analysis.explain.analysed_run import AnalysedRun
from gapless.runtime.analysis.ledger.causes import CAUSES, Cause
from gapless.runtime.analysis.ledger.fleet import Fleet
from gapless.runtime.analysis.ledger.ledger import Ledger
from gapless.runtime.analysis.ledger.summary import summarize
from gapless.runtime.analysis.live.ledger_observer import LedgerObserver
from gapless.runtime.analysis.live.live_spans import MAX_BOXES, live_spans
from gapless.runtime.analysis.live.recording import Recording, join_parts
from gapless.runtime.analysis.run_folder.record_jsonl import read_record, record_lines
from gapless.runtime.analysis.run_folder.run_info import RunInfo
from gapless.runtime.core.request_record import RequestRecord
from gapless.runtime.core.run_record import FaultRecord, RunRecord
from gapless.runtime.engine.plan import make_plan
from gapless.runtime.serving.engine import ServingEngine, run_engine
from gapless.runtime.serving.messages import (
    Abort,
    FromEngine,
    LiveSpans,
    Recovery,
    Shutdown,
    Snapshot,
    Started,
    Submit,
    ToEngine,
    Tokens,
    Watch,
    encoder,
    from_engine,
)
from tests.runtime.analysis.ledger.test_recovery import random_run
from tests.runtime.analysis.report.test_run_page import simulated_run
from tests.support.tiers import HANGS_S
from tests.support.virtual_pipeline import VirtualPipeline


class Engine:
    def __init__(self, connection: FrameSocket) -> None:
        self._connection = connection
        self._number = 0

    def send(self, message: ToEngine) -> None:
        self._connection.send(DATA, encoder.encode(message))

    def receive(self) -> list[FromEngine]:
        return [from_engine.decode(payload) for _, payload in self._connection.receive(60)]

    def complete(self, tokens: int) -> list[FromEngine]:
        """Send a request; return all that comes until the engine is idle again."""
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        self.send(Submit(self._number, [5 + self._number] * 200, params, time.monotonic()))
        self._number += 1
        found: list[FromEngine] = []
        ended = False
        while not (ended and isinstance(found[-1], Snapshot) and found[-1].is_idle):
            found += self.receive()
            ended = any(isinstance(one, Tokens) and one.reasons for one in found)
        return found


@contextmanager
def started() -> Iterator[Engine]:
    config = compose_one([], ServeConfig, "serve")
    ours, theirs = socket.socketpair()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=run_engine, args=(to_mapping(config), theirs, {}, LedgerObserver))
    process.start()
    theirs.close()
    engine = Engine(FrameSocket(ours))
    try:
        while not any(isinstance(one, Started) for one in engine.receive()):
            pass
        yield engine
        engine.send(Shutdown())
        process.join(HANGS_S)
        assert process.exitcode == 0
    finally:
        process.kill()


@pytest.mark.slow
def test_spans_come_only_while_somebody_looks() -> None:
    """They then are the ledger's seconds."""
    with started() as engine:
        first = engine.complete(20)
        engine.send(Watch(True))
        watched = engine.complete(40)
        engine.send(Watch(False))
        last = engine.complete(20)
    assert not [one for one in (*first, *last) if isinstance(one, LiveSpans)]
    spans = [one for one in watched if isinstance(one, LiveSpans)]
    assert sum(sum(part.prefill) for part in spans) == 200
    assert sum(sum(part.decodes) for part in spans) == 39
    before, after = first[-1], watched[-1]
    assert isinstance(before, Snapshot)
    assert isinstance(after, Snapshot)
    busy = sum(sum(part.end[0]) - sum(part.begin[0]) for part in spans) / 1e5
    assert busy == pytest.approx(after.busy[0] - before.busy[0], abs=1e-3)
    for cause in CAUSES:
        idle = sum(
            end - start
            for part in spans
            for start, end, code in zip(part.idle_start[0], part.idle_end[0], part.cause[0], strict=True)
            if code == cause.code
        )
        counted = after.idle[0][cause.code] - before.idle[0][cause.code]
        assert idle / 1e5 == pytest.approx(counted, abs=1e-3), cause


def test_a_grammar_that_compiles_holds_up_nobody_else() -> None:
    """Its own request waits, may be aborted meanwhile, and comes again without a wait."""
    choices = StructuredOutputs(choice=tuple(f"{number * 7919 % 99991} of many" for number in range(30_000)))
    slow = SamplingParams(max_tokens=8, structured_outputs=choices)
    with started() as engine:
        engine.complete(2)
        now = time.monotonic()
        engine.send(Submit(1, [7] * 20, SamplingParams(max_tokens=400, ignore_eos=True), now))
        for number in (2, 3):
            engine.send(Submit(number, [8] * 20, slow, now))
        engine.send(Abort([2]))
        numbers: list[int] = []
        while 3 not in numbers:
            numbers += [n for one in engine.receive() if isinstance(one, Tokens) for n in one.numbers]
        first = len(numbers)
        engine.send(Submit(4, [8] * 20, slow, now))
        while 4 not in numbers:
            numbers += [n for one in engine.receive() if isinstance(one, Tokens) for n in one.numbers]
    assert first > 15
    assert numbers[first:].count(1) < first
    assert 2 not in numbers


def test_a_message_of_spans_is_bounded() -> None:
    """It holds the newest micro-batches, and says how many it leaves out."""
    for stages in (1, 3):
        ledger = Ledger(simulated_run(stages, MAX_BOXES + 500))
        found = live_spans(ledger, 100)
        shown = len(found.prefill)
        assert shown == MAX_BOXES // stages
        assert found.left_out == MAX_BOXES + 500 - 100 - shown
        for stage in range(stages):
            assert len(found.begin[stage]) == len(found.end[stage]) == shown
            busy = sum(found.end[stage]) - sum(found.begin[stage])
            assert abs(busy / 1e5 - ledger.lanes[stage].seconds[-shown:].sum()) < 1e-5 * shown
            columns = ledger.idle_columns[stage]
            expected = columns.seconds[columns.place >= len(ledger.lanes[stage].begin) - shown].sum()
            idle = sum(found.idle_end[stage]) - sum(found.idle_start[stage])
            assert abs(idle / 1e5 - expected) < 1e-5 * len(found.cause[stage])


def test_a_fault_is_told_at_once() -> None:
    """Not only when the next state is due; the virtual clock stands still here."""
    config = compose_one([], ServeConfig, "serve")
    plan = make_plan(config)
    ours, theirs = socket.socketpair()
    pipeline = VirtualPipeline(1, plan.limits.depth.most, 100, 16, lambda micro_batch, stage: 0.01)
    engine = ServingEngine(config, plan, pipeline, FrameSocket(theirs))
    record = engine._coordinator.record
    front = FrameSocket(ours)

    def told() -> list[tuple[bool, str, int]]:
        engine._snapshot()
        if not select.select([ours], [], [], 0.05)[0]:
            return []
        found = [from_engine.decode(payload) for _, payload in front.receive(10)]
        assert all(isinstance(one, Snapshot) for one in found)
        return [(one.is_recovering, one.recovery.fault, one.recovery.epoch) for one in found]

    assert told() == [(False, "", 0)]
    assert told() == []
    record.faults.append(fault := FaultRecord(1, "hang", "nothing comes", 1.0, 2.0))
    assert told() == [(True, "nothing comes", 1)]
    assert told() == []
    fault.up, fault.parts = 3.0, {"start": 0.5}
    assert told() == [(False, "", 1)]
    assert Recovery.of(record.faults).seconds == {"detect": 1.0, "start": 0.5}


def test_without_an_observer_what_is_over_is_forgotten() -> None:
    config = compose_one([], ServeConfig, "serve")
    plan = make_plan(config)
    ours, theirs = socket.socketpair()
    pipeline = VirtualPipeline(1, plan.limits.depth.most, 100, 16, lambda micro_batch, stage: 0.01)
    engine = ServingEngine(config, plan, pipeline, FrameSocket(theirs))
    engine._add(Submit(0, [5] * 20, SamplingParams(max_tokens=8, ignore_eos=True), 0.0))
    record = engine._coordinator.record
    while engine._coordinator.has_work:
        engine._coordinator.step(engine._coordinator.clock.now() + 1.0)
        engine._snapshot(always=True)
    assert (record.micro_batches, record.spans, record.requests) == ([], [], [])
    snapshots = [from_engine.decode(payload) for _, payload in FrameSocket(ours).receive(10)]
    assert {(one.tokens, len(one.busy)) for one in snapshots if isinstance(one, Snapshot)} == {(0, 0)}


def test_spans_around_a_fault() -> None:
    """What a stage never computed has no length; the rest is all there."""
    ledger = Ledger(random_run(3))
    found = live_spans(ledger, 0)
    for stage in range(3):
        assert len(found.begin[stage]) == len(found.prefill)
        busy = sum(found.end[stage]) - sum(found.begin[stage])
        assert busy / 1e5 == pytest.approx(ledger.busy_seconds(stage), abs=1e-3)
        assert Cause.RECOVERY.code in found.cause[stage]


def test_a_window_s_requests_are_as_the_record_has_them() -> None:
    record = RunRecord(1, 10)
    recording = Recording(record, 0, [], 0.0)
    request = RequestRecord(
        3, 8, 0.5, [1.0, 2.0], 0.75, 2.0, "stop", preemptions=1, cached_tokens=4, kv_transfer=(0.5, 0.6), user="ann"
    )
    recording.add(request)
    recording.stop(0, 3.0)
    assert join_parts(iter([*recording.take([]), recording.last_part()])).requests == [request]


def test_a_window_has_the_tokens_that_came_in_it() -> None:
    """Of whole requests, of those that came before it, and of those that outlast it."""
    whole = simulated_run(2, 300)
    middle = len(whole.micro_batches) // 3
    began, ended = (whole.micro_batches[place].dispatched for place in (middle, 2 * middle))
    requests = [replace(request, token_times=list(request.token_times)) for request in whole.requests]
    there = [r for r in requests if r.arrival < began <= (r.finished or 0.0)]
    record = RunRecord(whole.num_stages, whole.num_blocks, spans=whole.spans, batch=whole.batch, depth=whole.depth)
    for request in there:
        request.token_times = [at for at in request.token_times if at < began]
    recording = Recording(record, middle, there, began)
    for request, its in zip(requests, whole.requests, strict=True):
        request.token_times = list(its.token_times)
        if began <= request.arrival < ended:
            recording.add(request)
    recording.stop(2 * middle, ended)
    found = join_parts(iter([*recording.take(whole.micro_batches), recording.last_part()]))
    until = max(ended, *(m.completed or 0.0 for m in found.micro_batches))
    came = [at for request in requests for at in request.token_times if began <= at <= until]
    numbers = summarize(Fleet([found]))
    assert found.crossing
    assert numbers["total_output_tokens"] == len(came) > 0
    assert numbers["completed"] == sum(began <= (r.finished or 0.0) <= until for r in requests)
    assert numbers["failed"] == 0
    first = [r for r in requests if r.token_times and began <= r.token_times[0] <= until]
    assert numbers["mean_ttft_ms"] == pytest.approx(1e3 * mean(r.token_times[0] - r.arrival for r in first))
    lines = [msgspec.json.encode(line) for line in record_lines(found, 0.0)]
    kept = read_record(lines)
    assert [r.earlier_tokens for r in kept.crossing] == [r.earlier_tokens for r in found.crossing]
    assert kept.window == found.window


def test_a_window_of_an_idle_server_is_idle() -> None:
    record = RunRecord(2, 10)
    recording = Recording(record, 7, [], 100.0)
    recording.stop(7, 105.0)
    found = join_parts(iter([recording.last_part()]))
    ledger = Ledger(found)
    ledger.check()
    assert ledger.seconds_by_cause()[Cause.STARVED_NO_REQUEST] == pytest.approx(10.0)
    assert Fleet([found]).duration == pytest.approx(5.0)
    assert AnalysedRun.of(found, RunInfo({})).words == ["There were no requests."]


def test_a_window_has_its_faults() -> None:
    """Those that were not over when it began."""
    whole = random_run(3)
    record = RunRecord(whole.num_stages, 10, faults=whole.faults[:1])
    recording = Recording(record, 0, [], 0.0)
    record.micro_batches, record.spans, record.faults = whole.micro_batches, whole.spans, whole.faults
    found = join_parts(iter([*recording.take(record.micro_batches), recording.last_part()]))
    assert [fault.since for fault in found.faults] == [fault.since for fault in whole.faults[1:]]
    assert found.spans == whole.spans
