"""A rank on a fake GPU: its start, its micro-batches, a repair and its end, in the order that NCCL and CUDA graphs need."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gapless.conf.build import build, load_group
from gapless.conf.schema import ModelConfig
from gapless.models import piecewise
from gapless.parallel import groups as groups_module
from gapless.parallel import nccl
from gapless.parallel.mesh import Mesh
from gapless.runtime.core.messages import MicroBatchMessage, MicroBatchResult, RankFailure
from gapless.runtime.cost.profile_point import Point
from gapless.runtime.pipeline import rank as rank_module
from gapless.runtime.pipeline.handshake import Halt, Progress, Ready, Rejoin, Setup
from gapless.runtime.pipeline.rank import _ServingRank
from gapless.runtime.profiling.grid import MessageMaker
from tests.support.fake_client import Coordinator, FakeClient
from tests.support.fake_cuda import CUDA
from tests.support.fake_driver import FakeDriver

MESHES = [Mesh(1, 1, 0), Mesh(1, 2, 1), Mesh(2, 1, 0), Mesh(2, 1, 1), Mesh(2, 2, 2), Mesh(3, 1, 1)]
MODEL = dataclasses.replace(build(ModelConfig, load_group("model", "tiny"), "model"), cuda_graphs=True, attention="sdpa")
assert MODEL.architecture is not None
ARCH = dataclasses.replace(MODEL.architecture, num_layers=3)
BLOCK = 16


@pytest.fixture
def driver() -> Iterator[FakeDriver]:
    with pytest.MonkeyPatch.context() as patch:
        for name in nccl.VARIABLES:
            patch.setenv(name, "1")  # as torchrun does with one of them
        patch.setattr(piecewise, "BUCKETS", (8, 16))
        with FakeDriver() as driver:
            yield driver
            if dist.is_initialized():
                driver.graphs.clear()
                groups_module._destroy()


class Rank:
    """A `_ServingRank` of a mesh in this thread, beside a coordinator's script in another."""

    def __init__(self, driver: FakeDriver, mesh: Mesh) -> None:
        self.driver, self.mesh, self.client = driver, mesh, FakeClient()
        self._messages = MessageMaker(ARCH.vocab_size, BLOCK)
        layers = [(stage, stage + 1) for stage in range(mesh.pp)]
        setup = Setup(mesh.pp, mesh.tp, MODEL, ARCH, layers, 2, 20, BLOCK, False, 0, 1, 60.0)

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


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_graphs_go_before_communicators_in_a_repair_and_at_the_end(driver: FakeDriver, mesh: Mesh) -> None:
    rank = Rank(driver, mesh)

    def script() -> None:
        rank.run()
        rank.halt(1)
        rank.run(epoch=1)

    rank.serve(script)
    words = [word for word in driver.journal if not word.startswith(("meet", "synchronize"))]
    begin, life = ["connect", "capture", "replay", "drop graphs"], ["begin abort", "abort"]
    assert words == [*begin, *life, *begin, "destroy"]
    assert not rank.client.of(RankFailure)
    assert rank.client.of(MicroBatchResult) or mesh.tp_rank
