"""The single-rank pipeline in this process, without Ray or sockets.

On a CPU `wait` computes. On CUDA `submit` queues the work, so that the device computes a micro-batch while the next one
is scheduled and queued: up to `depth` of them, or one more if the pipeline looks ahead.
"""

from __future__ import annotations

import os
import queue
import select
import socket
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ...conf.structured_outputs import StructuredOutputs
from ...kernels import cores
from ...parallel.mesh import Mesh
from ..core.messages import MicroBatchMessage, MicroBatchResult, Span
from ..core.run_record import FaultRecord
from .decode_rate import measure_decode_rate
from .handshake import Setup
from .processor_waits import ProcessorWaits
from .protocol import WallClock
from .start_warnings import say_attention, warn_of_fallback, warn_of_slow_ranks

if TYPE_CHECKING:
    from .stage_worker import PendingSampled


class LocalPipeline:
    """A `Pipeline` of one stage on one device ("cpu", "cuda:0").

    On CUDA it `looks_ahead` if allowed and the depth is 1: an unseen token is then always sampled by the previous
    micro-batch.
    """

    num_stages = 1

    def __init__(self, setup: Setup, device: str, looks_ahead: bool = False) -> None:
        import torch

        from ...parallel.device_clock import device_clock
        from ...parallel.groups import Groups
        from ...parallel.rendezvous import Rendezvous
        from .measure_machine import measure_machine, slow_reason
        from .stage_worker import StageWorker

        assert setup.pp == setup.tp == 1
        torch.set_num_threads(setup.threads or min(torch.get_num_threads(), cores.threads()))
        self.clock = WallClock()
        self.depth = setup.depth
        self.num_blocks = setup.num_blocks
        self.where = [f"{socket.gethostname()} pid {os.getpid()} {device}"]
        self._groups: Any = Groups.start(Rendezvous(0, 1, device=device), Mesh(1, 1), setup.timeout_s)
        machine = measure_machine(setup.stage(0), self._groups.mesh, self._groups.device)
        self._worker = StageWorker.build(setup, self._groups)
        self.machines = [replace(machine, slow_reason=slow_reason(self._worker.stage))]
        say_attention((self._worker.stage.attention.about,))
        warn_of_slow_ranks((self._worker.stage.is_slow,))
        self._is_cuda = self._groups.device.type == "cuda"
        self.looks_ahead = looks_ahead and self._is_cuda and self.depth == 1
        self._device_clock = device_clock(self._groups.device)
        self._waiting: deque[MicroBatchMessage] = deque()
        self._computed: deque[
            tuple[MicroBatchMessage, float, float, Any, Any, PendingSampled, tuple[float, int, int] | tuple[()]]
        ] = deque()  # or being computed
        self._idle_since, self._waits = self.clock.now(), ProcessorWaits()
        self._compiled: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()  # callbacks, from a thread
        self._told, self._hears = socket.socketpair()
        self._wakes = [self._hears.fileno()]
        measure = None if self._is_cuda else partial(measure_decode_rate, self, setup.num_groups)
        warn_of_fallback((self._worker.stage.fallback_reason,), measure)

    def wake_on(self, descriptor: int) -> None:
        """See `LivePipeline.wake_on`. It interrupts only a wait without a micro-batch."""
        self._wakes.append(descriptor)

    def compile(self, wanted: StructuredOutputs, on_done: Callable[[], None]) -> None:
        """See `LivePipeline.compile`."""

        def tell() -> None:
            self._compiled.put(on_done)
            self._told.send(b"\0")

        self._worker.compile(wanted, tell)

    def submit(self, micro_batch: MicroBatchMessage) -> None:
        """Queue a micro-batch's work on CUDA; on a CPU keep the micro-batch for `wait`, which computes it."""
        self._waiting.append(micro_batch)
        if self._is_cuda:
            self._compute()

    def wait(self, deadline: float) -> list[MicroBatchResult]:
        """Return the result of the oldest micro-batch once it is computed; without one, wait until `deadline`."""
        if not self._computed:
            if not self._waiting:
                if (left := deadline - self.clock.now()) > 0:
                    select.select(self._wakes, [], [], left)
                self._take_compiled()
                return []
            self._compute()
        self._take_compiled()
        micro_batch, heard, waited, *moments, sampled, load = self._computed.popleft()
        tokens = sampled.read()
        contended = 0.0 if self._is_cuda else self._waits.own() - waited
        begin, end = map(self._device_clock.seconds, moments)
        arrived = min(max(self._idle_since, heard), begin)
        times = (self._idle_since, arrived, begin, end, end)
        span = Span(micro_batch.micro_batch, 0, *times, 0.0, contended, *load)
        self._idle_since = end
        return [MicroBatchResult(micro_batch.epoch, micro_batch.micro_batch, [span], tokens)]

    def _take_compiled(self) -> None:
        while not self._compiled.empty():
            self._hears.recv(1)
            self._compiled.get()()

    def _compute(self) -> None:
        """Compute the oldest waiting micro-batch. On CUDA this only queues its work, without a host sync."""
        micro_batch, heard, waited = self._waiting.popleft(), self.clock.now(), self._waits.own()
        inputs = self._worker.prepare(micro_batch)
        begin = self._device_clock.mark() if self._is_cuda else heard
        sampled = self._worker.queue_sampling(micro_batch, self._worker.forward(inputs, None))
        end, load = self._device_clock.mark(), self._worker.expert_load.read()
        self._computed.append((micro_batch, heard, waited, begin, end, sampled, load))

    def restart(self, fault: FaultRecord) -> None:
        """Fail: errors of this pipeline are raised where they occur."""
        raise AssertionError("it has no faults")

    def close(self) -> None:
        """Destroy the process groups that this process joined. May be called twice."""
        if self._groups is not None:
            self._waits.close()
            self._groups.close()
            self._told.close()
            self._hears.close()
            self._groups = None
