"""A rank of its own pipeline, with real groups on a CPU: in which order a repair and an end come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

from gapless.conf.build import build, load_group
from gapless.conf.sampling import SamplingParams
from gapless.conf.schema import ModelConfig
from gapless.parallel.groups import Groups
from gapless.parallel.rendezvous import Rendezvous
from gapless.runtime.core.messages import DecodesMessage, MicroBatchMessage, MicroBatchResult, NewRequest, RankFailure
from gapless.runtime.core.messages import SegmentMessage as Segment
from gapless.runtime.pipeline.handshake import Halt, Ready, Rejoin, Setup
from gapless.runtime.pipeline.rank import _ServingRank
from gapless.runtime.pipeline.stage_worker import StageWorker
from tests.support.fake_client import Coordinator, FakeClient
from tests.support.lone_rank import stage_specs

MODEL = build(ModelConfig, load_group("model", "tiny"), "model")
NEW = NewRequest(0, 3, 0, SamplingParams(), ())


class _Store:
    def end(self) -> None:
        pass


class _Alone(_ServingRank):
    def _rendezvous(self, epoch: int) -> Rendezvous:
        self.store = _Store()  # type: ignore[assignment]
        return Rendezvous(0, 1, device="cpu")


@pytest.fixture
def journal(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    words: list[str] = []

    def noted(kind: type, name: str) -> None:
        real: Callable[..., Any] = getattr(kind, name)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            words.append(name)
            return real(self, *args, **kwargs)

        monkeypatch.setattr(kind, name, call)

    noted(_ServingRank, "_let_go")
    noted(StageWorker, "drop_graphs")
    noted(StageWorker, "restart")
    for name in ("abort", "close"):
        noted(Groups, name)
    return words


@pytest.fixture
def rank() -> Iterator[_Alone]:
    setup = Setup(stage_specs(MODEL, [(0, 4)], 10, 16), 1, depth=1, threads=1, timeout_s=60.0)
    yield _Alone(FakeClient(), setup, 0, "cpu")  # type: ignore[arg-type]
    assert not dist.is_initialized()


def micro_batch(epoch: int) -> MicroBatchMessage:
    return MicroBatchMessage(epoch, 0, [Segment(0, 0, [1, 2, 3], [0], True)], DecodesMessage(), [NEW])


def test_graphs_go_before_groups(rank: _Alone, journal: list[str]) -> None:
    client: Any = rank.client
    is_told: list[bool] = []
    end = rank.groups.end

    def note_and_end() -> None:
        is_told.append(rank.num_heard == 1 or not rank.inbox.empty())
        end()

    rank.groups.end = note_and_end  # type: ignore[method-assign]

    def script() -> None:
        client.tell(micro_batch(0))
        client.until(lambda: client.of(MicroBatchResult))
        client.tell(Halt())
        client.until(lambda: "close" in journal)
        client.tell(Rejoin(1))
        client.until(lambda: len(client.of(Ready)) == 2)
        client.tell(micro_batch(1))
        client.until(lambda: len(client.of(MicroBatchResult)) == 2)

    coordinator = Coordinator(client, script)
    rank.serve()
    coordinator.check()
    first, second = (result.sampled.tokens for result in client.of(MicroBatchResult))
    assert first == second, "weights have stayed, and the cache is empty"
    assert not client.of(RankFailure)
    repair, at_the_end = "_let_go drop_graphs abort close", "drop_graphs close"
    assert " ".join(journal) == f"{repair} close restart drop_graphs {at_the_end}"
    assert is_told == [True], "the main thread hears it first"
