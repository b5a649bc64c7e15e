"""The pipeline of one rank in this process, without Ray or sockets: `wait` computes."""

from __future__ import annotations

import os
import select
import socket
from collections import deque
from typing import Any

from ...parallel.mesh import Mesh
from ..core.messages import MicroBatchMessage, MicroBatchResult, Span
from ..core.run_record import FaultRecord
from .handshake import Setup
from .processor_waits import ProcessorWaits
from .protocol import WallClock
from .start_warnings import warn_without_cpp


class LocalPipeline:
    """A `Pipeline` of one stage on one device ("cpu", "cuda:0")."""

    num_stages = 1

    def __init__(self, setup: Setup, device: str) -> None:
        import torch

        from ...parallel.groups import Groups
        from ...parallel.rendezvous import Rendezvous
        from .stage_worker import StageWorker

        assert setup.pp == setup.tp == 1
        if setup.threads:
            torch.set_num_threads(setup.threads)
        self.clock = WallClock()
        self.depth = setup.depth
        self.num_blocks = setup.num_blocks
        self.where = [f"{socket.gethostname()} pid {os.getpid()} {device}"]
        self._groups: Any = Groups.start(Rendezvous(0, 1, device=device), Mesh(1, 1), setup.timeout_s)
        self._worker = StageWorker.build(setup, self._groups)
        warn_without_cpp((self._worker.stage.no_cpp,))
        self._micro_batches: deque[MicroBatchMessage] = deque()
        self._idle_since, self._waits = self.clock.now(), ProcessorWaits()
        self._wakes: list[int] = []

    def wake_on(self, descriptor: int) -> None:
        """See `LivePipeline.wake_on`. It ends only a wait without a micro-batch."""
        self._wakes.append(descriptor)

    def submit(self, micro_batch: MicroBatchMessage) -> None:
        """Keep a micro-batch until `wait`, which computes it."""
        self._micro_batches.append(micro_batch)

    def wait(self, deadline: float) -> list[MicroBatchResult]:
        """Compute the oldest micro-batch and return its result; without one, wait until `deadline`."""
        if not self._micro_batches:
            if (left := deadline - self.clock.now()) > 0:
                select.select(self._wakes, [], [], left)
            return []
        micro_batch = self._micro_batches.popleft()
        begin, waited = self.clock.now(), self._waits.own()
        logits = self._worker.forward(self._worker.prepare(micro_batch), None)
        sampled = self._worker.sample(micro_batch, logits)
        end = self.clock.now()
        contended = self._waits.own() - waited
        span = Span(micro_batch.micro_batch, 0, self._idle_since, begin, begin, end, end, contended=contended)
        self._idle_since = end
        return [MicroBatchResult(micro_batch.epoch, micro_batch.micro_batch, [span], sampled)]

    def restart(self, fault: FaultRecord) -> None:
        """Fail: errors of this pipeline are raised where they occur."""
        raise AssertionError("it has no faults")

    def close(self) -> None:
        """Leave the groups of ranks that this process joined. May be called twice."""
        if self._groups is not None:
            self._waits.close()
            self._groups.close()
            self._groups = None
