"""One process queues work on CUDA when it is submitted, and waits for nothing until a result is asked for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from gapless.conf.build import build, load_group
from gapless.conf.sampling import SamplingParams
from gapless.conf.schema import ModelConfig
from gapless.models.graphed_stage import GraphedStage
from gapless.parallel import device_clock
from gapless.parallel.groups import Groups
from gapless.parallel.mesh import Mesh
from gapless.parallel.rendezvous import Rendezvous
from gapless.runtime.core.messages import (
    UNSEEN_TOKEN,
    DecodesMessage,
    MicroBatchMessage,
    MicroBatchResult,
    NewRequest,
    SegmentMessage,
)
from gapless.runtime.pipeline.handshake import Setup
from gapless.runtime.pipeline.local import LocalPipeline
from gapless.runtime.pipeline.stage_worker import StageWorker
from gapless.runtime.pipeline.start_warnings import _said_reasons
from tests.support.fake_cuda import CUDA, FakeCuda, HostWaitError
from tests.support.lone_rank import LLAMA, lone_stage, stage_specs

MODEL = build(ModelConfig, load_group("model", "tiny"), "model")
SOON = 1e18


def new(request: int) -> NewRequest:
    return NewRequest(request, 5, request, SamplingParams(max_tokens=9), ())


FIRST = MicroBatchMessage(0, 0, [SegmentMessage(0, 0, [5, 6, 7, 8, 9], [0, 1], True)], DecodesMessage(), [new(0)])
SECOND = MicroBatchMessage(0, 1, [SegmentMessage(1, 0, [9, 8, 7, 6, 5], [2, 3], True)], DecodesMessage(), [new(1)])


def after(results: list[MicroBatchResult]) -> MicroBatchMessage:
    """Return the decodes of both requests. The results have their tokens; that of the second may be unseen."""
    tokens = [result.sampled.tokens[0] for result in results if result.sampled is not None]
    return MicroBatchMessage(0, 2, [], DecodesMessage.of([0, 1], [5, 5], [*tokens, UNSEEN_TOKEN][:2], {}))


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    with Groups.start(Rendezvous(0, 1, "", "cpu"), Mesh(1, 1), 60):
        yield


def local_pipeline(device: str, depth: int = 2, looks_ahead: bool = False) -> LocalPipeline:
    assert MODEL.architecture is not None
    stages = stage_specs(MODEL, [(0, MODEL.architecture.num_layers)], 20, 4)
    setup = Setup(stages, 1, depth, threads=1, timeout_s=60.0)
    return LocalPipeline(setup, device, looks_ahead)


@dataclass
class FakeClock:
    """The clock of a device that passes each moment 1 s after the last one, which is asked for when it is awaited."""

    awaited: list[float] = field(default_factory=list)
    marked: float = 0.0

    def mark(self) -> float:
        self.marked += 1.0
        return self.marked

    def seconds(self, moment: float) -> float:
        self.awaited.append(moment)
        return moment


@pytest.mark.parametrize("graphs", [False, True])
def test_cuda_work_is_queued_by_submit(monkeypatch: pytest.MonkeyPatch, graphs: bool) -> None:
    """Micro-batches are prepared, computed and sampled without a wait of the host, with tokens that it has not seen."""
    with FakeCuda() as cuda:
        with cuda.may_wait():
            worker = StageWorker(lone_stage(LLAMA, Mesh(1, 1), CUDA, torch.bfloat16, 20))
        if graphs:
            worker._graphs = GraphedStage(worker.stage, list)
        monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
        monkeypatch.setattr(StageWorker, "build", lambda *_: worker)
        clock = FakeClock()
        monkeypatch.setattr(device_clock, "device_clock", lambda _: clock)
        assert [local_pipeline("cuda:0", depth, True).looks_ahead for depth in (1, 2)] == [True, False]
        pipeline = local_pipeline("cuda:0")
        unseen = DecodesMessage.of([1], [5], [UNSEEN_TOKEN], {})
        for micro_batch in (FIRST, SECOND, MicroBatchMessage(0, 2, [], unseen)):
            pipeline.submit(micro_batch)
        assert (clock.marked, clock.awaited) == (6.0, [])
        with pytest.raises(HostWaitError, match="synchronize"):
            pipeline.wait(SOON)


def test_results_are_the_same_whether_queued_or_not() -> None:
    """In the order of `submit`, with spans from the moments of the device, and whether a token is seen or not."""
    plain = local_pipeline("cpu")
    expected = [result for each in (FIRST, SECOND) for result in run(plain, each)]
    expected += run(plain, after(expected))
    queued = local_pipeline("cpu")
    clock = FakeClock()
    queued._is_cuda, queued._device_clock, queued._idle_since = True, clock, 0.0
    for micro_batch in (FIRST, SECOND):
        queued.submit(micro_batch)
    assert clock.awaited == []
    found = queued.wait(SOON)
    assert clock.awaited == [1.0, 2.0], "the second goes on"
    queued.submit(after(found))
    assert clock.awaited == [1.0, 2.0], "its token is not waited for"
    found += queued.wait(SOON)
    found += queued.wait(SOON)
    assert [each.sampled for each in found] == [each.sampled for each in expected]
    assert [each.micro_batch for each in found] == [0, 1, 2]
    spans: list[Any] = [(span.ready, span.begin, span.end, span.sent) for each in found for span in each.spans]
    assert spans == [(0.0, 1.0, 2.0, 2.0), (2.0, 3.0, 4.0, 4.0), (4.0, 5.0, 6.0, 6.0)]
    assert queued.wait(0.0) == []


def test_a_cpu_computes_while_it_is_waited_for() -> None:
    pipeline = local_pipeline("cpu", 1, looks_ahead=True)
    assert not pipeline.looks_ahead
    pipeline.submit(FIRST)
    begun = pipeline.clock.now()
    (result,) = pipeline.wait(SOON)
    (span,) = result.spans
    assert span.ready <= begun <= span.input == span.begin < span.end == span.sent <= pipeline.clock.now()


def test_the_speed_that_a_fallback_measures_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    build_worker = StageWorker.build

    def build_without_compiler(setup: Setup, groups: Groups) -> StageWorker:
        worker = build_worker(setup, groups)
        worker.stage.fallback_reason = "no compiler; install GCC"
        return worker

    unmeasured = local_pipeline("cpu")
    monkeypatch.setattr(StageWorker, "build", build_without_compiler)
    _said_reasons.clear()
    measured = local_pipeline("cpu")
    (line,) = [line for line in caplog.messages if "no compiler" in line]
    assert re.search(r" \(expect about [\d.e+]+ tokens/s for a single request\): no compiler; install GCC; ", line)
    found, expected = ([each for step in (FIRST, SECOND) for each in run(p, step)] for p in (measured, unmeasured))
    assert [each.sampled for each in found] == [each.sampled for each in expected]
    assert [each.micro_batch for each in found] == [0, 1]


def run(pipeline: LocalPipeline, micro_batch: MicroBatchMessage) -> list[MicroBatchResult]:
    pipeline.submit(micro_batch)
    return pipeline.wait(SOON)
