"""The main function of a rank, the same under every launcher: join the coordinator, build the stage, run micro-batches.

A second thread receives the coordinator's messages. While a micro-batch computes, it posts the receive of the next
activation, and makes of the next message what the stage needs. On CUDA the main thread only queues work; a third thread
waits until the device has done it, and reports.

When another rank fails, the coordinator sends `Halt`: a rank then drops what it does and keeps its weights. The main
thread hears it before any group is ended, since it must drop its CUDA graphs first; each error from then on is an echo.
With `Rejoin` it connects with the others anew. A rank that fails by itself ends, and another one takes its place.

When the coordinator dies, the process ends, whatever the main thread does.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ...kernels import cores
from ...parallel.control import ControlClient, Endpoint
from ...parallel.frames import ConnectionLost
from ...parallel.mesh import Mesh
from ..core.messages import Compile, Compiled, MicroBatchMessage, MicroBatchResult, RankFailure, Span, Stop
from .handshake import Halt, Present, Ready, Rejoin, RollCall, Setup, StartPart, encoder, to_rank
from .processor_waits import ProcessorWaits
from .start_parts import PartTimer

if TYPE_CHECKING:
    import torch

    from ...models.stage import StageInputs
    from ...parallel.rendezvous import Rendezvous
    from ...parallel.transport import Arrival, Transport
    from .stage_worker import PendingSampled

    InboxItem = tuple[MicroBatchMessage, StageInputs, Arrival | None, float] | Halt | Rejoin | None

_log = logging.getLogger(__name__)
_WATCH_S = 0.5
_REPORT_S = 1.0  # in which the reporter must end, once the communicators have been aborted
_BROKEN = (
    "connection closed",
    "connection reset",
    "connection refused",
    "broken pipe",
    "timed out",
    "timeout",
    "remote",
)


def warm_up() -> None:
    """Import all that a rank needs."""
    from . import measure_machine, stage_worker  # noqa: F401


def run_rank(endpoint: Endpoint, rank: int, device: str, start_timeout_s: float) -> None:
    """Run micro-batches as `rank` on `device` ("cpu", "cuda:0") until the coordinator sends `Stop`.

    Raises:
        Exception: the error that ended the rank, after it has been sent to the coordinator.
    """
    begin = time.monotonic()
    warm_up()  # before this rank joins, since the others wait for it from then on
    imports_s = time.monotonic() - begin
    client = ControlClient(endpoint, rank, start_timeout_s)
    stage = -1
    is_built = threading.Event()
    try:
        setup = to_rank.decode(client.receive()[0])
        assert isinstance(setup, Setup), setup
        stage = Mesh(setup.pp, setup.tp, rank).stage
        threading.Thread(target=_watch, args=(client, rank, is_built), name="watch", daemon=True).start()
        client.send(encoder.encode(StartPart(rank, "imports", imports_s, is_done=True)))
        serving = _ServingRank(client, setup, rank, device)
        is_built.set()
        serving.serve()
    except BaseException as error:
        is_built.set()
        failure = RankFailure(rank, stage, f"{type(error).__name__}: {error}".strip(), secondary=_is_echo(error))
        with contextlib.suppress(ConnectionLost):
            client.send(encoder.encode(failure))
        raise
    finally:
        client.close()


def _watch(client: ControlClient, rank: int, is_built: threading.Event) -> None:
    """End the process if the coordinator goes while the stage is being built."""
    while not is_built.wait(_WATCH_S):
        if client.is_cut_off():
            _end_without_coordinator(rank)


def _end_without_coordinator(rank: int) -> None:
    """End the process at once: the main thread may hang in a collective."""
    try:
        _log.error("rank %d: the coordinator is gone", rank)
    finally:
        os._exit(1)


def _is_echo(error: BaseException) -> bool:
    """Return whether the error is most likely the consequence of another rank's death."""
    text = str(error).lower()
    return isinstance(error, ConnectionLost) or any(word in text for word in _BROKEN)


@dataclass(frozen=True, slots=True)
class _Computed:
    """A micro-batch that is computed or queued on the device. `Any`: a moment of the device's clock."""

    message: MicroBatchMessage
    free: Any  # the stage could have begun
    heard: float  # the message was there, in seconds
    arrived: Any | None  # the activation was there; None on the first stage
    begin: Any
    end: Any
    sent: float  # the send had been handed over, in seconds
    measured: tuple[Any, ...]  # the fields of `Span` after its times
    sampled: PendingSampled | None


class _ServingRank:
    """Runs the micro-batches of one stage as the coordinator publishes them, and reports when it did."""

    def __init__(self, client: ControlClient, setup: Setup, rank: int, device: str) -> None:
        import torch

        from ...parallel.device_clock import device_clock
        from ...parallel.groups import Groups
        from .measure_machine import measure_machine, slow_reason
        from .stage_worker import StageWorker

        threads = setup.threads or cores.threads(setup.node_ranks[rank])
        cores.pin(threads)
        torch.set_num_threads(threads)
        self.client = client
        self.setup = setup
        self.mesh = Mesh(setup.pp, setup.tp, rank)
        self.device = device
        self.awaited_epoch: int | None = setup.epoch  # None after `Halt`
        self.num_halts = 0  # that this rank has been sent
        self.num_heard = 0  # of them, by the main thread
        self.transport: Transport | None = None  # while this rank has let go of the others
        self.reporter: _Reporter | None = None
        self.inbox: queue.SimpleQueue[InboxItem | Exception] = queue.SimpleQueue()
        self._begin_parts()
        self.groups = Groups.start(self._rendezvous(setup.epoch), self.mesh, setup.timeout_s)
        rendezvous_s = self.parts.report("groups", True)
        self.is_cuda = self.groups.device.type == "cuda"
        self.clock = device_clock(self.groups.device)
        self._machine = measure_machine(setup, self.mesh, self.groups.device)
        self.worker = StageWorker.build(setup, self.groups, self._on_part)
        self._machine = replace(self._machine, slow_reason=slow_reason(setup, self.worker.stage))
        self.waits = None if self.is_cuda else ProcessorWaits()
        self._waited = 0.0  # of all threads, when the stage could have begun
        self._is_ready(setup.epoch, rendezvous_s)

    def _begin_parts(self) -> None:
        self.parts = PartTimer(self.mesh.rank, lambda word: self.client.send(encoder.encode(word)), time.monotonic())

    def _on_part(self, part: str, is_done: bool) -> None:
        """Tell the coordinator of a part of the start, which is given up if the pipeline has failed meanwhile."""
        if self._is_halting:
            raise ConnectionLost("the pipeline is being restarted")
        self.parts.report(part, is_done)

    @property
    def _is_halting(self) -> bool:
        """Whether there is a `Halt` that the main thread has not heard yet. Whatever fails now fails because of it."""
        return self.num_halts != self.num_heard

    def _rendezvous(self, epoch: int) -> Rendezvous:
        """Return the rendezvous of the ranks of an epoch. They leave no trace for those of another."""
        from ...parallel.rendezvous import Rendezvous
        from ...parallel.store import ControlStore

        timeout = timedelta(seconds=self.setup.timeout_s)
        self.store = ControlStore(self.client.store_connection, timeout, f"epoch {epoch}/")
        host = self.client.host
        return Rendezvous(self.mesh.rank, self.mesh.world_size, device=self.device, store=self.store, host=host)

    def _is_ready(self, epoch: int, rendezvous_s: float) -> None:
        """Make what lasts for an epoch, and say that this rank can compute."""
        from ...parallel.transport import Transport

        setup, rank = self.setup, self.mesh.rank
        self.transport = Transport(self.groups, setup.arch.hidden_size, self.worker.stage.dtype, setup.depth)
        device = self.groups.device
        self.reporter = _Reporter(self._send_result, self.inbox.put, device) if self.is_cuda else None
        self._report = self._send_result if self.reporter is None else self.reporter.report
        process, stage = f"pid {os.getpid()} {device}", self.worker.stage
        about = stage.fallback_reason, stage.attention.about, stage.is_slow, self._machine
        self.client.send(encoder.encode(Ready(rank, socket.gethostname(), process, epoch, rendezvous_s, *about)))

    def serve(self) -> None:
        threading.Thread(target=self._hear, name="control", daemon=True).start()
        while True:
            failed = None
            try:
                if not self._go_on():
                    break
            except Exception as error:
                if not (self._is_halting or _is_echo(error)):
                    raise
                failed = f"{type(error).__name__}: {error}"
            if failed is not None:  # only now, since an error holds what its frames hold
                self._let_go()  # so that those who wait for this rank go on too
                self.client.send(encoder.encode(RankFailure(self.mesh.rank, self.mesh.stage, failed, secondary=True)))
        if self.transport is not None:
            if self.reporter is not None:
                self.reporter.close()
            self.transport.drain()
        self.worker.drop_graphs()
        self.groups.close()

    def _go_on(self) -> bool:
        """Do what comes next. Returns False at the end."""
        message = self._next()
        if isinstance(message, Halt):
            self.num_heard += 1
            self._let_go()
        elif isinstance(message, Rejoin):
            self._rejoin(message.epoch)
        elif message is not None:
            self._run(*message)
        return message is not None

    def _hear(self) -> None:
        import torch

        torch.set_num_threads(1)  # in this thread: the cores belong to the stage
        if self.is_cuda:
            torch.cuda.set_device(self.groups.device)
        while True:
            try:
                payloads = self.client.receive()
            except ConnectionLost:
                _end_without_coordinator(self.mesh.rank)
            for payload in payloads:
                message = to_rank.decode(payload)
                if isinstance(message, Stop):
                    self.inbox.put(None)
                    return
                try:
                    self._take(message)
                except Exception as error:
                    self.inbox.put(error)

    def _take(self, message: Halt | Rejoin | MicroBatchMessage | Compile | RollCall) -> None:
        """Make ready what the main thread will do, and hand it over."""
        if isinstance(message, RollCall):
            self.client.send(encoder.encode(Present(self.mesh.rank)))
        elif isinstance(message, Compile):
            self.worker.compile(message.wanted, partial(self._say_compiled, message.number))
        elif isinstance(message, MicroBatchMessage):
            heard, transport = time.monotonic(), self.transport
            if transport is None:
                return
            arrival = None if self.mesh.is_first else transport.post_receive(message.num_tokens)
            self.inbox.put((message, self.worker.prepare(message), arrival, heard))
        else:
            self.awaited_epoch = message.epoch if isinstance(message, Rejoin) else None
            if isinstance(message, Halt):
                self.num_halts += 1
            self.inbox.put(message)
            if isinstance(message, Halt):
                self.store.end()
                self.groups.end()

    def _say_compiled(self, number: int) -> None:
        if self.mesh.tp_rank == 0:  # the others take as long
            with contextlib.suppress(ConnectionLost):
                self.client.send(encoder.encode(Compiled(number)))

    def _next(self) -> InboxItem:
        """Return what comes next, None at the end. While this rank has let go of the others, micro-batches are dropped.

        Raises:
            Exception: what failed in another thread.
        """
        if self.transport is not None:
            self._free = self.clock.mark()
            self._waited = self.waits.all(anew=True) if self.waits is not None else 0.0
        while True:
            message = self.inbox.get()
            if self.transport is not None or message is None or isinstance(message, Halt | Rejoin):
                if isinstance(message, Exception):
                    raise message
                return message

    def _let_go(self) -> None:
        """Disconnect from the other ranks. What is in flight is dropped.

        The graphs go first, since NCCL waits for them, and then the communicators, for which the device waits.

        Raises:
            RuntimeError: NCCL or the device does not let go.
        """
        reporter, self.reporter, self.transport = self.reporter, None, None
        if reporter is not None:
            reporter.drop()
        self.worker.drop_graphs()
        self.groups.abort()
        if reporter is not None:
            reporter.join()

    def _rejoin(self, epoch: int) -> None:
        """Connect with the other ranks as they are in an epoch. Weights stay."""
        self._begin_parts()
        self.client.send(encoder.encode(Present(self.mesh.rank)))
        rendezvous = self._rendezvous(epoch)
        if self.awaited_epoch != epoch:
            raise ConnectionLost("the pipeline is being restarted")  # `Halt` came before it could end this rendezvous
        self.groups.restart(rendezvous, self.setup.timeout_s)
        rendezvous_s = self.parts.report("groups", True)
        self.worker.restart()
        self._is_ready(epoch, rendezvous_s)

    def _run(self, micro_batch: MicroBatchMessage, inputs: StageInputs, arrival: Arrival | None, heard: float) -> None:
        hidden, arrived = arrival.wait(self.clock) if arrival is not None else (None, None)
        before = self.waits.all() - self._waited if self.waits is not None else 0.0
        own = self.waits.own() if self.waits is not None else 0.0
        begin = self.clock.mark()
        out = self.worker.forward(inputs, hidden)
        sampled = None
        if self.mesh.is_last:
            sampled = self.worker.queue_sampling(micro_batch, out)
        end = self.clock.mark()
        contended = (before, self.waits.own() - own if self.waits is not None else 0.0)
        if not self.mesh.is_last:
            assert self.transport is not None
            self.transport.send(out)
        if self.mesh.tp_rank == 0 or (sampled is not None and sampled.own.rows):
            sent = time.monotonic()
            measured = (*contended, *self.worker.expert_load.read())
            self._report(_Computed(micro_batch, self._free, heard, arrived, begin, end, sent, measured, sampled))

    def _send_result(self, done: _Computed) -> None:
        """Send the coordinator a micro-batch's tokens, and from a stage's first rank its span, once it is computed."""
        ready, begin, end = (self.clock.seconds(moment) for moment in (done.free, done.begin, done.end))
        arrived = done.heard if done.arrived is None else self.clock.seconds(done.arrived)
        number = done.message.micro_batch
        times = (ready, min(max(ready, arrived), begin), begin, end, max(end, done.sent))
        span = Span(number, self.mesh.stage, *times, *done.measured)
        sampled = None if done.sampled is None else done.sampled.read()
        spans = [] if self.mesh.tp_rank else [span]
        self.client.send(encoder.encode(MicroBatchResult(done.message.epoch, number, spans, sampled)))


class _Reporter:
    """Sends results from a thread of its own, which waits for the device where the main thread goes on.

    Args:
        send: sends one result.
        fail: is called with an error that `send` raised.
        device: the device that it waits for.
    """

    def __init__(
        self, send: Callable[[_Computed], None], fail: Callable[[Exception], None], device: torch.device
    ) -> None:
        self._send = send
        self._fail = fail
        self._device = device
        self._is_dropped = False
        self._done: queue.SimpleQueue[_Computed | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="report", daemon=True)
        self._thread.start()

    def report(self, done: _Computed) -> None:
        """Send a result as soon as the device has computed it."""
        self._done.put(done)

    def close(self) -> None:
        """Wait until everything has been sent."""
        self._done.put(None)
        self._thread.join()

    def drop(self) -> None:
        """Drop what has not been sent, and errors. `join` follows, once nothing keeps the device waiting."""
        self._is_dropped = True
        self._done.put(None)

    def join(self) -> None:
        """Wait for the end of the thread.

        Raises:
            RuntimeError: the device computes on.
        """
        self._thread.join(_REPORT_S)
        if self._thread.is_alive():
            raise RuntimeError(f"{self._device} still computes {_REPORT_S:g} s after its communicators were aborted")

    def _run(self) -> None:
        import torch

        try:
            torch.cuda.set_device(self._device)  # each thread begins on device 0, and makes a context there
            while (done := self._done.get()) is not None:
                if not self._is_dropped:
                    self._send(done)
        except Exception as error:
            if not self._is_dropped:
                self._fail(error)
