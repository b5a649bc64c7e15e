"""Ranks that are threads: they speak the protocol of a rank over real sockets, and compute nothing."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from gapless.conf.clusters import ClusterConfig
from gapless.conf.schema import HardwareConfig, ParallelConfig
from gapless.parallel.control import ControlClient, Endpoint
from gapless.parallel.real_placement import Place
from gapless.runtime.core.messages import MicroBatchMessage, MicroBatchResult, RankFailure, Sampled, Span, Stop
from gapless.runtime.pipeline.handshake import Present, Ready, Rejoin, RollCall, Setup, StartPart, encoder, to_rank
from gapless.runtime.pipeline.protocol import WallClock
from tests.support.tiers import HANGS_S


class ThreadRank:
    """A rank of a pipeline. Tests set what it does next.

    Attributes:
        heard: all messages, in their order.
        computes: it answers micro-batches; else they stay where they are.
        answers: it answers roll calls.
        rejoins: it lets go of a pipeline that failed.
        ready: it says that it is ready, once it has been set up or has rejoined.
    """

    def __init__(
        self, rank: int, stage: int, is_last: bool, endpoint: Endpoint, ready: bool, fallback_reason: str = ""
    ) -> None:
        self.rank, self.stage, self.is_last = rank, stage, is_last
        self.fallback_reason = fallback_reason
        self.heard: list[Any] = []
        self.computes = self.answers = self.rejoins = True
        self.ready = ready
        self.ended: str | None = None
        self.client: ControlClient | None = None
        self._thread = threading.Thread(target=self._run, args=(endpoint,), daemon=True)
        self._thread.start()

    def send(self, message: Any) -> None:
        assert self.client is not None
        self.client.send(encoder.encode(message))

    def fail(self, error: str, *, secondary: bool = False) -> None:
        self.send(RankFailure(self.rank, self.stage, error, secondary))

    def die(self) -> None:
        """Cut the connection, as the end of a process does."""
        if self.client is not None:
            with contextlib.suppress(OSError):  # it is cut already
                self.client._connection.socket.shutdown(socket.SHUT_RDWR)  # so that its thread wakes
            self.client.close()

    def join(self) -> None:
        self._thread.join(HANGS_S)
        assert not self._thread.is_alive()

    def kinds(self) -> list[str]:
        return [type(message).__name__ for message in self.heard]

    def _run(self, endpoint: Endpoint) -> None:
        try:
            self.client = ControlClient(endpoint, self.rank, 10.0)
            while True:
                for payload in self.client.receive():
                    self.heard.append(message := to_rank.decode(payload))
                    if isinstance(message, Stop):
                        return
                    self._take(message)
        except OSError:
            pass
        finally:
            self.ended = "ended"
            self.die()

    def _take(self, message: Any) -> None:
        if isinstance(message, Setup | Rejoin):
            if isinstance(message, Rejoin):
                if not self.rejoins:
                    return
                self.send(Present(self.rank))
            else:
                self.send(StartPart(self.rank, "weights", 1.5 + self.rank, is_done=True))
            if self.ready:
                self.send(Ready(self.rank, "node", f"pid {id(self)}", message.epoch, 0.001, self.fallback_reason))
        elif isinstance(message, RollCall) and self.answers:
            self.send(Present(self.rank))
        elif isinstance(message, MicroBatchMessage) and self.computes:
            now, number = WallClock().now(), message.micro_batch
            span = Span(number, self.stage, now, now, now, now, now)
            self.send(MicroBatchResult(message.epoch, number, [span], Sampled([7]) if self.is_last else None))


class ThreadLauncher:
    """Starts each rank as a `ThreadRank`. With `has_room` false none is started again.

    Attributes:
        ranks: those that run, by their number.
        replaced: which were replaced, for each fault.
        kept: those that went on with fewer stages.
        unready: those that do not say that they are ready.
        fallback_reasons: why ranks lack the C++ operators; those that have them are left out.
    """

    can_replace = True

    def __init__(self, unready: Collection[int] = (), fallback_reasons: Mapping[int, str] | None = None) -> None:
        self.unready = unready
        self.fallback_reasons = fallback_reasons or {}
        self.ranks: dict[int, ThreadRank] = {}
        self.replaced: list[list[int]] = []
        self.kept: list[int] | None = None
        self.has_room = True
        self.gone: dict[int, str] = {}

    def check(self, parallel: ParallelConfig, hardware: HardwareConfig) -> None:
        pass

    def start(
        self, endpoint: Endpoint, parallel: ParallelConfig, hardware: HardwareConfig, cluster: ClusterConfig
    ) -> None:
        self._parallel = parallel
        for rank in range(parallel.world_size):
            self._start(rank, endpoint)

    def _start(self, rank: int, endpoint: Endpoint) -> None:
        stage, is_first_slice = divmod(rank, self._parallel.tp)
        samples = stage == self._parallel.pp - 1 and not is_first_slice
        reason = self.fallback_reasons.get(rank, "")
        self.ranks[rank] = ThreadRank(rank, stage, samples, endpoint, rank not in self.unready, reason)

    def places(self) -> dict[int, Place]:
        return {}

    def replace(self, ranks: Collection[int], endpoint: Endpoint) -> None:
        self.replaced.append(sorted(ranks))
        for rank in ranks:
            self.ranks.pop(rank).die()
            self.gone.pop(rank, None)
            if self.has_room:
                self._start(rank, endpoint)

    def unplaced(self) -> set[int]:
        return set(range(self._parallel.world_size)) - self.ranks.keys()

    def keep(self, ranks: Sequence[int], endpoint: Endpoint, parallel: ParallelConfig) -> None:
        self.kept, self._parallel = list(ranks), parallel
        for rank in self.ranks.values():
            rank.join()
        self.ranks.clear()
        for number in range(len(ranks)):
            self._start(number, endpoint)

    def poll(self) -> dict[int, str]:
        return dict(self.gone)

    def stop(self) -> None:
        for rank in self.ranks.values():
            rank.die()
        for rank in self.ranks.values():
            rank.join()
