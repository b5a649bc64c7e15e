"""A rank on a fake GPU: its start, micro-batches, repair and end come in the order that NCCL and CUDA graphs need."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gapless.conf.build import build, load_group
from gapless.conf.schema import ModelConfig
from gapless.models import graphed_stage
from gapless.parallel import groups as groups_module
from gapless.parallel import nccl
from gapless.parallel.mesh import Mesh
from gapless.runtime.core.messages import MicroBatchMessage, MicroBatchResult, RankFailure
from gapless.runtime.pipeline import rank as rank_module
from gapless.runtime.pipeline import start_parts, waits
from gapless.runtime.pipeline.handshake import Halt, Ready, Rejoin, Setup, StartPart
from gapless.runtime.pipeline.rank import _Reporter, _ServingRank
from gapless.runtime.simulation.cost.profile_point import Point
from gapless.runtime.simulation.profiling.grid import MessageMaker
from tests.support.fake_client import Coordinator, FakeClient
from tests.support.fake_cuda import CUDA
from tests.support.fake_driver import HANG_S, FakeDriver
from tests.support.lone_rank import stage_specs
from tests.support.tiers import HANGS_S

MESHES = [Mesh(1, 1, 0), Mesh(1, 2, 1), Mesh(2, 1, 0), Mesh(2, 1, 1), Mesh(2, 2, 2), Mesh(3, 1, 1)]
MODEL = dataclasses.replace(
    build(ModelConfig, load_group("model", "tiny"), "model"), cuda_graphs=True, attention="sdpa", dtype="bfloat16"
)
assert MODEL.architecture is not None
ARCH = dataclasses.replace(MODEL.architecture, num_layers=3)
BLOCK = 16


@pytest.fixture
def driver() -> Iterator[FakeDriver]:
    with pytest.MonkeyPatch.context() as patch:
        for name in nccl.VARIABLES:
            patch.setenv(name, "1")  # as torchrun does with one of them
        patch.setattr(graphed_stage, "BUCKETS", (8, 16))
        for module, name in ((groups_module, "_HEARING_S"), (groups_module, "_ABORT_S"), (waits, "REPORT_S")):
            patch.setattr(module, name, 3 * HANG_S)  # a busy machine is slow, and does not hang
        with FakeDriver() as driver:
            yield driver
            driver.holders.clear()
            groups_module._destroy()


class Rank:
    """A `_ServingRank` of a mesh in this thread, beside a coordinator's script in another."""

    def __init__(self, driver: FakeDriver, mesh: Mesh) -> None:
        self.driver, self.mesh, self.client = driver, mesh, FakeClient()
        self._messages = MessageMaker(ARCH.vocab_size, BLOCK)
        layers = [(stage, stage + 1) for stage in range(mesh.pp)]
        setup = Setup(
            stage_specs(dataclasses.replace(MODEL, architecture=ARCH), layers, 20, BLOCK),
            mesh.tp,
            depth=2,
            threads=1,
            timeout_s=60.0,
        )

        class OnFakeDevice(_ServingRank):
            def _hear(self) -> None:
                with driver.on_this_thread():
                    super()._hear()

            def _is_ready(self, epoch: int, rendezvous_s: float) -> None:
                driver._driver.may_wait = False
                super()._is_ready(epoch, rendezvous_s)

            def _rejoin(self, epoch: int) -> None:
                driver._driver.may_wait = True
                super()._rejoin(epoch)

        driver._driver.may_wait = True
        self.serving = OnFakeDevice(self.client, setup, mesh.rank, str(CUDA))  # type: ignore[arg-type]

    def micro_batch(self, epoch: int = 0, rows: int = 5) -> MicroBatchMessage:
        message = self._messages.make(Point(chunk=rows, decodes=2, context=3, sample=1))
        return MicroBatchMessage(epoch, *[getattr(message, f) for f in message.__struct_fields__[1:]])

    def serve(self, script: Callable[[], None]) -> None:
        coordinator = Coordinator(self.client, script)
        self.serving.serve()
        coordinator.check()

    def run(self, epoch: int = 0) -> None:
        """Have it compute a micro-batch, and wait for the result."""
        done = len(self.client.of(MicroBatchResult))
        journal = len(self.driver.journal)
        self.client.tell(self.micro_batch(epoch))
        if self.mesh.tp_rank == 0:
            self.client.until(lambda: len(self.client.of(MicroBatchResult)) > done)
        else:
            self.client.until(lambda: "replay" in self.driver.journal[journal:])

    def halt(self, epoch: int) -> None:
        self._messages = MessageMaker(ARCH.vocab_size, BLOCK)  # the cache is empty
        self.client.tell(Halt())
        self.client.tell(Rejoin(epoch))
        self.client.until(lambda: [ready.epoch for ready in self.client.of(Ready)][-1:] == [epoch])


def kinds(words: list[str]) -> list[str]:
    return [word for word in words if not word.startswith(("meet", "synchronize"))]


BEGIN, LIFE, ABORT = ["connect", "capture"], ["replay", "drop graphs"], ["begin abort", "abort"]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_graphs_go_before_communicators_in_a_repair_and_at_the_end(driver: FakeDriver, mesh: Mesh) -> None:
    rank = Rank(driver, mesh)

    def script() -> None:
        rank.run()
        rank.halt(1)
        rank.run(epoch=1)

    rank.serve(script)
    assert kinds(driver.journal) == [*BEGIN, *LIFE, *ABORT, *BEGIN, *LIFE, "destroy"]
    assert not rank.client.of(RankFailure)


def test_a_restart_drops_graphs_before_it_captures_others(driver: FakeDriver) -> None:
    worker = Rank(driver, Mesh(1, 2, 0)).serving.worker
    worker.restart()
    assert kinds(driver.journal) == [*BEGIN, "drop graphs", "capture"]
    worker.drop_graphs()


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_neighbours_meet_before_anything_takes_long(driver: FakeDriver, mesh: Mesh) -> None:
    rank = Rank(driver, mesh)
    neighbours = [mesh.previous] * (not mesh.is_first) + [mesh.next] * (not mesh.is_last)
    met = [f"meet {rank}" for rank in (neighbours if mesh.stage % 2 else reversed(neighbours))]
    if mesh.tp > 1:
        met.append("meet stage")
    assert driver.journal == ["connect", *met, "synchronize", "capture"]
    rank.serve(lambda: rank.halt(1))
    assert driver.journal.count("meet stage") == 2 * (mesh.tp > 1), "and in each epoch"


def test_only_the_pipeline_s_groups_have_few_thread_blocks(driver: FakeDriver) -> None:
    rank = Rank(driver, Mesh(2, 2, 1))
    assert driver.pipeline_ctas == {(0, 2): 2, (1, 3): 2}
    rank.serve(lambda: None)


def test_torch_s_watchdog_is_told_to_end_nothing(driver: FakeDriver) -> None:
    rank = Rank(driver, Mesh(1, 2, 0))
    assert {name: driver.environment[name] for name in nccl.VARIABLES} == nccl.VARIABLES
    rank.serve(lambda: None)
    header = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp"
    assert [name for name in nccl.VARIABLES if f'"{name}"' not in header.read_text()] == []


WRAPPED = "[1] is setting up NCCL communicator, but store->get('0:1') got error: ConnectionLost: the pipeline"
ABORTED = dist.DistBackendError("NCCL communicator was aborted on rank 1.")


@pytest.mark.parametrize(
    ("tp", "error"), [(1, None), (2, ABORTED), (1, dist.DistBackendError(WRAPPED)), (2, MemoryError("odd"))], ids=str
)
def test_what_fails_after_halt_is_an_echo(
    driver: FakeDriver, tp: int, error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that launches waits for a device that is stuck: it hears `Halt` only after the abort has begun.

    Without an `error`, torch raises its own: the group is not registered any more.
    """
    monkeypatch.setattr(groups_module, "_HEARING_S", 0.2)
    rank, is_launching = Rank(driver, Mesh(2, tp, 0)), threading.Event()

    def launch() -> None:
        if driver.is_stuck.is_set():
            is_launching.set()
            driver.until_free()
            if error is not None:
                raise error
            rank.client.until(lambda: not dist.is_initialized())

    def script() -> None:
        driver.launch = launch
        driver.is_stuck.set()
        rank.client.tell(rank.micro_batch())
        is_launching.wait(HANGS_S)
        rank.halt(1)
        rank.run(epoch=1)

    rank.serve(script)
    (failure,) = rank.client.of(RankFailure)
    assert failure.secondary
    assert str(error or "is not registered, please create group") in failure.error
    if tp > 1:  # without a sum, no communicator is captured
        journal = kinds(driver.journal)
        begun, dropped, ended = (journal.index(word) for word in ("begin abort", "drop graphs", "abort"))
        assert journal[:begun] == [*BEGIN, "replay"]
        assert begun < dropped < ended, "an abort may begin again for what the first one left"
        assert journal[ended + 1 :] == [*BEGIN, *LIFE, "destroy"]


@pytest.mark.parametrize("text", ["CUDA error: an illegal memory access was encountered", "Group 1 is not registered"])
def test_what_fails_without_halt_is_the_rank_s_own(driver: FakeDriver, text: str) -> None:
    rank = Rank(driver, Mesh(2, 1, 0))

    def launch() -> None:
        raise RuntimeError(text)

    driver.launch = launch
    with pytest.raises(RuntimeError, match=text):
        rank.serve(lambda: rank.client.tell(rank.micro_batch()))
    rank.serving.worker.drop_graphs()


def test_halt_is_heard_while_graphs_are_captured(driver: FakeDriver) -> None:
    rank = Rank(driver, Mesh(1, 2, 1))

    def halt_again() -> None:
        if rank.serving.awaited_epoch == 1 and rank.serving.num_halts == 1:
            rank.client.tell(Halt())
            rank.client.until(lambda: rank.serving.num_halts == 2)

    driver.on_capture = halt_again

    def script() -> None:
        rank.client.tell(Halt())
        rank.client.tell(Rejoin(1))
        rank.client.until(lambda: rank.serving.num_halts == 2)
        rank.client.tell(Rejoin(2))
        rank.client.until(lambda: rank.client.of(Ready)[-1].epoch == 2)

    rank.serve(script)
    assert [ready.epoch for ready in rank.client.of(Ready)] == [0, 2]
    given_up = ["connect", "capture", "drop graphs", *ABORT]
    assert kinds(driver.journal) == [*BEGIN, "drop graphs", *ABORT, *given_up, *BEGIN, "drop graphs", "destroy"]


def test_a_rank_whose_communicators_do_not_end_ends_itself(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups_module, "_ABORT_S", 0.2)
    rank = Rank(driver, Mesh(1, 2, 0))
    kept = list(driver.holders)  # somebody else holds them
    with pytest.raises(RuntimeError, match=r"^NCCL did not abort its communicators within 0\.2 s$") as caught:
        rank.serve(lambda: rank.client.tell(Halt()))
    assert not rank_module._is_echo(caught.value), "another rank takes its place"
    assert kept
    kept.clear()
    rank.serving.groups._start_abort().join()


def test_parts_of_a_start_are_told_as_they_end_and_while_graphs_are_captured(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_parts, "_SIGN_S", 0.0)
    rank = Rank(driver, Mesh(1, 2, 0))
    rank.serve(lambda: rank.halt(1))
    told = rank.client.of(StartPart)
    assert [word.part for word in told if word.is_done] == ["groups", "weights", "capture", "groups", "capture"]
    going_on = [word.part for word in told if not word.is_done]
    assert going_on.count("capture") == 2 * 2 * 2 * 2, "twice in both starts, for two pieces of two buckets each"
    assert going_on.count("weights") > 5
    assert all(word.seconds >= 0 and word.rank == 0 for word in told)
    assert told[-1] == rank.client.said[rank.client.said.index(rank.client.of(Ready)[-1]) - 1], "all before `Ready`"


def test_the_reporter_waits_on_its_own_device_and_has_no_word_after_it_was_dropped(driver: FakeDriver) -> None:
    rank = Rank(driver, Mesh(1, 1, 0))
    rank.serve(rank.run)
    assert driver.chosen["report"] == CUDA
    failures: list[Exception] = []

    def fail(_: Any) -> None:
        has_begun.set()
        driver.until_free()
        raise RuntimeError("CUDA error")

    has_begun = threading.Event()
    driver.is_stuck.set()
    reporter = _Reporter(fail, failures.append, CUDA)
    reporter.report(object())  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(waits, "REPORT_S", 0.05)
        has_begun.wait(HANGS_S)
        reporter.drop()
        with pytest.raises(RuntimeError, match="cuda:0 is still computing"):
            reporter.join()
    driver.is_stuck.clear()
    reporter.join()
    assert failures == []
