"""The coordinator's end of a pipeline, over real sockets, with ranks that are threads and compute nothing."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from gapless.conf.build import build, load_group
from gapless.conf.clusters import ClusterConfig
from gapless.conf.errors import ConfigError
from gapless.conf.schema import HardwareConfig, ModelConfig, ParallelConfig
from gapless.runtime.core.messages import DecodesMessage, MicroBatchMessage, MicroBatchResult, Span
from gapless.runtime.core.run_record import FaultRecord
from gapless.runtime.pipeline import remote, waits
from gapless.runtime.pipeline.handshake import Setup, StartPart
from gapless.runtime.pipeline.protocol import PipelineError, PipelineFault
from gapless.runtime.pipeline.recovery_limit import RecoveryLimit
from gapless.runtime.pipeline.remote import RemotePipeline
from gapless.runtime.pipeline.start_warnings import _said_reasons
from tests.support.lone_rank import stage_specs
from tests.support.thread_ranks import ThreadLauncher
from tests.support.tiers import HANGS_S

MODEL = build(ModelConfig, load_group("model", "tiny"), "model")


def setup_of(pp: int, tp: int) -> Setup:
    stages = stage_specs(MODEL, [(stage, stage + 1) for stage in range(pp)], 10 * pp, 16)
    return Setup(stages, tp, depth=pp, threads=1, timeout_s=60.0)


@contextmanager
def pipeline(
    pp: int = 2,
    tp: int = 1,
    fewer_stages: Callable[[int], Setup] | None = None,
    on_progress: Callable[[str], None] = lambda text: None,
    unready: Collection[int] = (),
    fallback_reasons: Mapping[int, str] | None = None,
    **limits: Any,
) -> Iterator[tuple[RemotePipeline, ThreadLauncher]]:
    launcher = ThreadLauncher(unready, fallback_reasons)
    parallel = ParallelConfig(pp=pp, tp=tp, launcher="ray", **limits)
    found = RemotePipeline(
        launcher, parallel, HardwareConfig(), ClusterConfig(), setup_of(pp, tp), on_progress, fewer_stages
    )
    try:
        yield found, launcher
    finally:
        found.close()


def micro_batch(number: int, epoch: int = 0) -> MicroBatchMessage:
    return MicroBatchMessage(epoch, number, [], DecodesMessage.of([0], [number], [1], {}))


def results_of(found: RemotePipeline, count: int) -> list[MicroBatchResult]:
    results: list[MicroBatchResult] = []
    deadline = time.monotonic() + HANGS_S
    while len(results) < count and time.monotonic() < deadline:
        results += found.wait(time.monotonic() + 0.2)
    return results


def fault_of(found: RemotePipeline) -> PipelineFault:
    with pytest.raises(PipelineFault) as caught:
        results_of(found, 100)
    return caught.value


def repair(found: RemotePipeline, fault: PipelineFault, epoch: int = 1) -> FaultRecord:
    """Restart the pipeline after a fault, and wait until it stands."""
    record = FaultRecord(epoch, fault.reason, str(fault), fault.since, found.clock.now())
    found.restart(record)
    deadline = time.monotonic() + HANGS_S
    while record.up is None:
        assert time.monotonic() < deadline, "it does not stand again"
        assert found.wait(time.monotonic() + 0.5) == []
    return record


def test_a_start_says_what_each_part_took() -> None:
    lines: list[str] = []
    with pipeline(3, on_progress=lines.append):
        pass
    said = r"ranks are ready after \d\.\d s; the slowest of each part: weights 3\.5 s \(rank 2\)"
    assert re.fullmatch(said, lines[-1])


def test_a_start_with_a_fallback_measures_decodes_of_the_whole_pipeline(caplog: pytest.LogCaptureFixture) -> None:
    _said_reasons.clear()
    with pipeline(3, fallback_reasons={1: "no compiler"}) as (found, launcher):
        (line,) = caplog.messages
        rate = r"\(expect about [\d.e+]+ tokens/s for a single request\)"
        assert re.match(rf"using torch's operators on rank 1, which are slower {rate}: no compiler; ", line)
        assert [rank.kinds() for rank in launcher.ranks.values()] == [["Setup", *["MicroBatchMessage"] * 2]] * 3
        assert found._patience_s == 300.0, "a chunk may take far longer than these decodes"
        found.submit(micro_batch(0))
        assert [result.micro_batch for result in results_of(found, 3)] == [0, 0, 0], "nothing is left of them"
        launcher.ranks[1].die()
        repair(found, fault_of(found))
        assert launcher.ranks[0].kinds().count("MicroBatchMessage") == 3, "a repair measures nothing"
    assert len(caplog.messages) == 1


def test_ranks_without_a_fallback_measure_nothing() -> None:
    with pipeline() as (_, launcher):
        assert launcher.ranks[0].kinds() == ["Setup"]


def test_a_start_that_takes_too_long_says_how_far_it_got() -> None:
    text = "rank 1 (stage 1) did not connect and load within parallel.start_timeout_s=0.5; raise it"
    with pytest.raises(PipelineError, match=re.escape(text)) as caught, pipeline(unready=[1], start_timeout_s=0.5):
        pass
    assert str(caught.value).endswith("if that takes longer here (rank 1: weights 2.5 s)")


def test_the_limit_on_a_start_counts_from_the_last_sign_of_life() -> None:
    with pipeline() as (found, launcher):
        found._parallel = replace(found._parallel, start_timeout_s=1.0)
        launcher.unready = [0]
        launcher.ranks[0].die()
        fault = fault_of(found)
        found.restart(FaultRecord(1, fault.reason, str(fault), fault.since, found.clock.now()))
        begin = found.clock.now()
        while found.clock.now() < begin + 2.5:
            found.wait(time.monotonic() + 0.2)
            if found._repair is not None and found._repair.joined is not None:
                launcher.ranks[0].send(StartPart(0, "capture", found.clock.now() - begin, is_done=False))
        with pytest.raises(PipelineError, match=r"did not recover .*\(rank 0: weights 1\.5 s, capture 2\.\d s so far"):
            results_of(found, 1)


def test_each_stage_reports_and_the_last_one_ends_a_micro_batch() -> None:
    with pipeline() as (found, _):
        for number in range(2):
            found.submit(micro_batch(number))
        results = results_of(found, 4)
        by_stage = {s: [r.micro_batch for r in results if r.spans[0].stage == s] for s in range(2)}
        assert by_stage == {0: [0, 1], 1: [0, 1]}
        assert all((r.sampled is not None) == (r.spans[0].stage == 1) for r in results)
        found.submit(micro_batch(2))  # there is room for it
        assert len(results_of(found, 2)) == 2


def test_times_of_another_node_are_put_on_our_clock() -> None:
    with pipeline() as (found, launcher):
        found._server.clock_offset[1] = 100.0  # its clock is ahead
        launcher.ranks[1].computes = False
        span = Span(0, 1, 101.0, 102.0, 103.0, 104.0, 105.0)
        launcher.ranks[1].send(MicroBatchResult(0, 0, [span], None))
        (result,) = results_of(found, 1)
        assert result.spans == [Span(0, 1, 1.0, 2.0, 3.0, 4.0, 5.0)]


def test_a_wait_ends_at_its_deadline_or_when_something_wakes_it() -> None:
    reader, writer = os.pipe()
    with pipeline() as (found, _):
        start = time.monotonic()
        assert found.wait(start + 0.1) == []
        assert time.monotonic() >= start + 0.1
        found.wake_on(reader)
        os.write(writer, b"!")
        assert found.wait(start + HANGS_S) == []
        assert time.monotonic() < start + HANGS_S
    for descriptor in (reader, writer):
        os.close(descriptor)


@pytest.mark.parametrize(("pp", "tp", "dies"), [(2, 1, 0), (2, 1, 1), (2, 2, 2)])
def test_a_rank_that_dies_is_replaced_and_the_others_stay(pp: int, tp: int, dies: int) -> None:
    with pipeline(pp, tp) as (found, launcher):
        before, others = dict(launcher.ranks), set(range(pp * tp)) - {dies}
        for rank in before.values():
            rank.computes = False
        found.submit(micro_batch(0))
        progress = found.clock.now()
        before[dies].die()
        fault = fault_of(found)
        assert (fault.reason, str(fault)) == ("process", f"rank {dies} (stage {dies // tp}) died")
        assert fault.since <= progress
        record = repair(found, fault)
        assert launcher.replaced == [[dies]]
        assert (record.ranks, record.stages) == ([dies], None)
        assert record.up is not None
        assert sum(record.parts.values()) == pytest.approx(record.up - record.detected, abs=1e-9)
        assert min(record.parts.values()) >= 0
        assert {r for r, rank in launcher.ranks.items() if rank is before[r]} == others
        for rank in others:
            assert launcher.ranks[rank].kinds()[-2:] == ["Halt", "Rejoin"]
        (setup,) = launcher.ranks[dies].heard
        assert (setup.epoch, setup.node_ranks) == (1, [pp * tp] * (pp * tp))
        assert found.where[dies] == f"node pid {id(launcher.ranks[dies])}"
        for rank in launcher.ranks.values():
            rank.computes = True
        found.submit(micro_batch(1, epoch=1))
        assert {r.epoch for r in results_of(found, pp * tp)} == {1}


def test_the_cause_of_a_fault_is_named_and_not_its_echoes() -> None:
    with pipeline(3) as (found, launcher):
        launcher.ranks[0].fail("RuntimeError: Connection closed by peer", secondary=True)
        launcher.ranks[2].fail("MemoryError: too much")
        fault = fault_of(found)
        assert (fault.reason, str(fault)) == ("error", "rank 2 (stage 2) failed: MemoryError: too much")
        repair(found, fault)
        assert launcher.replaced == [[2]], "who only lost its neighbour stays"


def test_an_echo_that_comes_before_its_cause_is_not_taken_for_it() -> None:
    with pipeline(3) as (found, launcher):
        launcher.ranks[0].fail("RuntimeError: Connection closed by peer", secondary=True)
        later = threading.Timer(0.2, launcher.ranks[2].fail, ("MemoryError: too much",))
        later.start()
        assert str(fault_of(found)) == "rank 2 (stage 2) failed: MemoryError: too much"
        later.join()


def test_connections_that_break_without_an_end_replace_nobody() -> None:
    with pipeline() as (found, launcher):
        launcher.ranks[1].fail("RuntimeError: Connection reset by peer", secondary=True)
        fault = fault_of(found)
        assert fault.reason == "connection"
        assert repair(found, fault).ranks == []
        assert launcher.ranks[0].kinds()[-1] == launcher.ranks[1].kinds()[-1] == "Rejoin"


def test_a_launcher_s_word_on_a_dead_rank_is_part_of_the_error() -> None:
    with pipeline(max_recoveries=0) as (found, launcher):
        launcher.gone[1] = "killed by signal 9"
        with pytest.raises(PipelineError, match=r"^rank 1 \(stage 1\) died: killed by signal 9$") as caught:
            results_of(found, 1)
        assert not isinstance(caught.value, PipelineFault), "nothing is repaired"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "ROLL_CALL_S", 1.0)
    monkeypatch.setattr(waits, "POLL_S", 0.05)


def test_a_rank_that_answers_nothing_is_the_one_that_hangs(impatient: None) -> None:
    with pipeline(2, 2, step_timeout_s=0.3) as (found, launcher):
        launcher.ranks[2].computes = launcher.ranks[3].answers = False
        found.submit(micro_batch(0))
        fault = fault_of(found)
        assert (fault.reason, found._dead) == ("hang", {3})
        assert str(fault).startswith("stage 1 hangs (rank 3 without an answer, ")
        assert "no progress within parallel.step_timeout_s=0.3; raise it" in str(fault)
        repair(found, fault)
        assert launcher.replaced == [[3]], "a rank that hangs is connected, and goes all the same"


def test_where_all_answer_the_stage_behind_the_others_hangs(impatient: None) -> None:
    with pipeline(3, step_timeout_s=1.0) as (found, launcher):
        launcher.ranks[1].computes = launcher.ranks[2].computes = False
        found.submit(micro_batch(0))
        results_of(found, 1)
        launcher.ranks[2].send(MicroBatchResult(0, 0, [Span(0, 2, 0, 0, 0, 0, 0)], None))
        fault = fault_of(found)
        assert str(fault).startswith("stage 1 hangs (rank 1, ")
        assert found._dead == {1}


def test_an_idle_pipeline_does_not_hang(impatient: None) -> None:
    with pipeline(step_timeout_s=0.5) as (found, _):
        found.submit(micro_batch(0))
        results_of(found, 2)
        assert found.wait(time.monotonic() + 0.8) == []
        found.submit(micro_batch(1))  # its time begins now
        assert len(results_of(found, 2)) == 2


@pytest.mark.parametrize(
    ("longest_s", "recoveries", "patience_s"),
    [(0.0, 5, 300.0), (0.1, 5, 10.0), (2.0, 5, 40.0), (100.0, 5, 300.0), (0.1, 0, 300.0)],
)
def test_patience_goes_by_what_micro_batches_have_taken_where_a_restart_mends(
    longest_s: float, recoveries: int, patience_s: float
) -> None:
    with pipeline(max_recoveries=recoveries) as (found, _):
        found._longest_pass_s = longest_s
        assert found._patience_s == patience_s


def test_a_fault_during_a_repair_replaces_also_who_was_not_ready() -> None:
    with pipeline(3) as (found, launcher):
        launcher.ranks[0].die()
        fault = fault_of(found)
        found.restart(FaultRecord(1, fault.reason, str(fault), fault.since, found.clock.now()))
        launcher.ranks[0].ready = False
        deadline = time.monotonic() + HANGS_S
        while "Rejoin" not in launcher.ranks[1].kinds():
            assert time.monotonic() < deadline
            found.wait(time.monotonic() + 0.05)
        launcher.ranks[1].fail("RuntimeError: Connection closed by peer", secondary=True)  # it only waits
        assert found.wait(time.monotonic() + 0.2) == []
        launcher.ranks[2].fail("ValueError: its own")
        fault = fault_of(found)
        assert str(fault) == "rank 2 (stage 2) failed: ValueError: its own"
        stale = launcher.ranks[1]
        stale.rejoins = False
        record = FaultRecord(2, fault.reason, str(fault), fault.since, found.clock.now())
        found.restart(record)
        assert launcher.replaced == [[0], [0, 2]]
        for epoch, is_up in ((1, False), (2, True)):  # of which the first has ended
            stale.send(msgspec.structs.replace(READY, rank=1, epoch=epoch))
            for _ in range(10):
                if record.up is None:
                    found.wait(time.monotonic() + 0.1)
            assert (record.up is not None) == is_up
        assert record.ranks == [0, 2]


READY = remote.Ready(0, "node", "pid 1")


def test_a_rank_that_lives_and_does_not_let_go_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "REJOIN_S", 1.0)
    with pipeline(3) as (found, launcher):
        launcher.ranks[1].rejoins = False
        launcher.ranks[0].die()
        fault = fault_of(found)
        found.restart(FaultRecord(1, fault.reason, str(fault), fault.since, found.clock.now()))
        launcher.ranks[0].ready = False  # who starts may take longer
        fault = fault_of(found)
        assert (fault.reason, str(fault)) == ("hang", "rank 1 (stage 1) did not leave a failed pipeline")
        assert found._dead == {1}


def test_a_repair_that_takes_too_long_ends_the_run() -> None:
    with pipeline() as (found, launcher):
        found._parallel = replace(found._parallel, start_timeout_s=1.0)
        launcher.ranks[0].die()
        fault = fault_of(found)
        found.restart(FaultRecord(1, fault.reason, str(fault), fault.since - 2.0, found.clock.now()))
        launcher.ranks[0].ready = False
        assert found.wait(time.monotonic() + 0.1) == [], "the bound is on the repair, not on what was before"
        text = r"^rank 0 \(stage 0\) did not recover \(rank 0 .+\) within parallel\.start_timeout_s=1; raise it"
        with pytest.raises(PipelineError, match=text):
            results_of(found, 1)


@pytest.mark.parametrize("tp", [1, 2])
def test_the_stages_that_are_left_go_on_without_one_that_has_no_place(
    tp: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waits, "PLACES_POLL_S", 0.05)
    asked: list[int] = []

    def fewer_stages(num_stages: int) -> Setup:
        asked.append(num_stages)
        return setup_of(num_stages, tp)

    with pipeline(3, tp, fewer_stages, resplit_after_s=0.3) as (found, launcher):
        launcher.has_room = False
        launcher.ranks[tp].die()  # the first of stage 1
        start = time.monotonic()
        record = repair(found, fault_of(found))
        assert time.monotonic() - start >= 0.3
        assert asked == [2]
        assert launcher.kept == [*range(tp), *range(2 * tp, 3 * tp)], "whole stages"
        assert (found.num_stages, found.num_blocks, len(found.where)) == (2, 20, 2 * tp)
        assert (record.stages, record.ranks) == (2, list(range(2 * tp)))
        assert "no room for rank " in caplog.text
        found.submit(micro_batch(0, epoch=1))
        assert len(results_of(found, 2 * tp)) == 2 * tp


def test_no_stage_or_one_that_is_too_small_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "PLACES_POLL_S", 0.05)

    def too_few(num_stages: int) -> Setup:
        raise ConfigError("no memory")

    with pipeline(2, 1, too_few, resplit_after_s=0.1) as (found, launcher):
        launcher.has_room = False
        launcher.ranks[1].die()
        with pytest.raises(PipelineError, match=r"no room for rank 1 \(stage 1\), .* stages: no memory$"):
            repair(found, fault_of(found))
    with pipeline(1, 2, too_few, resplit_after_s=0.1) as (found, launcher):
        found._parallel = replace(found._parallel, start_timeout_s=1.0)
        launcher.has_room = False
        launcher.ranks[1].die()
        with pytest.raises(PipelineError, match="did not recover"):  # nothing is left to go on with
            repair(found, fault_of(found))


def test_faults_are_counted_within_the_window() -> None:
    limit = RecoveryLimit(2, 10.0)
    for now in (0.0, 5.0, 10.5, 16.0, 26.1):
        limit.count("a fault", now)
    limit.count("a fault", 36.0)
    with pytest.raises(PipelineError, match=r"^a fault; fault 3 within 10 s \(parallel\.max_recoveries=2\)$"):
        limit.count("a fault", 36.1)
