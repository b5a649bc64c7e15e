"""The main function of a rank, the same under every launcher: join the coordinator, build the stage, run micro-batches.

A second thread receives the coordinator's messages. While a micro-batch computes, it posts the receive of the next
activation, and prepares the stage's inputs from the next message. On CUDA the main thread only queues work; a third
thread waits for the device and reports the results.

When another rank fails, the coordinator sends `Halt`: a rank then stops its work and keeps its weights. The main thread
is notified before any process group is aborted, since it must drop its CUDA graphs first. Errors from then on are
secondary. On `Rejoin` it reconnects to the others. A rank that fails by itself exits and is replaced.

When the coordinator dies, the process exits, whatever the main thread is doing.
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
from ..core.messages import Compile, Compiled, MicroBatchMessage, MicroBatchResult, RankFailure, Span, Stop
from . import waits
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
    """Import everything that a rank needs."""
    from . import measure_machine, stage_worker  # noqa: F401


def run_rank(endpoint: Endpoint, rank: int, device: str, start_timeout_s: float) -> None:
    """Run micro-batches as `rank` on `device` ("cpu", "cuda:0") until the coordinator sends `Stop`.

    Raises:
        Exception: the error that stopped the rank, after it has been sent to the coordinator.
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
        stage = setup.mesh(rank).stage
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
    """Exit the process if the coordinator is lost while the stage is being built."""
    while not is_built.wait(_WATCH_S):
        if client.is_cut_off():
            _end_without_coordinator(rank)


def _end_without_coordinator(rank: int) -> None:
    """Exit the process at once: the main thread may hang in a collective."""
    try:
        _log.error("rank %d: lost the coordinator", rank)
    finally:
        os._exit(1)


def _is_echo(error: BaseException) -> bool:
    """Return whether the error is most likely secondary, caused by another rank's death."""
    text = str(error).lower()
    return isinstance(error, ConnectionLost) or any(word in text for word in _BROKEN)


@dataclass(frozen=True, slots=True)
class _Computed:
    """A micro-batch that is computed or queued on the device. `Any` is a moment of `DeviceClock`."""

    message: MicroBatchMessage
    free: Any  # the stage was free
    heard: float  # the message arrived, in seconds
    arrived: Any | None  # the activation arrived; None on the first stage
    begin: Any
    end: Any
    sent: float  # the send had been posted, in seconds
    measured: tuple[Any, ...]  # the fields of `Span` after its times
    sampled: PendingSampled | None


class _ServingRank:
    """Runs the micro-batches of one stage as the coordinator publishes them, and reports their times."""

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
        self.mesh = setup.mesh(rank)
        self.device = device
        self.awaited_epoch: int | None = setup.epoch  # None after `Halt`
        self.num_halts = 0  # received by this rank
        self.num_heard = 0  # handled by the main thread
        self.transport: Transport | None = None  # None while disconnected from the other ranks
        self.reporter: _Reporter | None = None
        self.inbox: queue.SimpleQueue[InboxItem | Exception] = queue.SimpleQueue()
        self._begin_parts()
        self.groups = Groups.start(self._rendezvous(setup.epoch), self.mesh, setup.timeout_s)
        rendezvous_s = self.parts.report("groups", True)
        self.is_cuda = self.groups.device.type == "cuda"
        self.clock = device_clock(self.groups.device)
        self._machine = measure_machine(setup.stage(rank), self.mesh, self.groups.device)
        self.worker = StageWorker.build(setup, self.groups, self._on_part)
        self._machine = replace(self._machine, slow_reason=slow_reason(self.worker.stage))
        self.waits = None if self.is_cuda else ProcessorWaits()
        self._waited = 0.0  # run-queue delay of all threads when the stage became free
        self._is_ready(setup.epoch, rendezvous_s)

    def _begin_parts(self) -> None:
        self.parts = PartTimer(self.mesh.rank, lambda word: self.client.send(encoder.encode(word)), time.monotonic())

    def _on_part(self, part: str, is_done: bool) -> None:
        """Report a part of the startup to the coordinator; abort the startup if the pipeline has failed meanwhile."""
        if self._is_halting:
            raise ConnectionLost("the pipeline is being restarted")
        self.parts.report(part, is_done)

    @property
    def _is_halting(self) -> bool:
        """Whether the main thread has yet to handle a `Halt`. Errors in the meantime are secondary."""
        return self.num_halts != self.num_heard

    def _rendezvous(self, epoch: int) -> Rendezvous:
        """Return the rendezvous of an epoch's ranks; its store keys are separate from other epochs'."""
        from ...parallel.rendezvous import Rendezvous
        from ...parallel.store import ControlStore

        timeout = timedelta(seconds=self.setup.timeout_s)
        self.store = ControlStore(self.client.store_connection, timeout, f"epoch {epoch}/")
        host = self.client.host
        return Rendezvous(self.mesh.rank, self.mesh.world_size, device=self.device, store=self.store, host=host)

    def _is_ready(self, epoch: int, rendezvous_s: float) -> None:
        """Create the state of an epoch, and report that this rank is ready."""
        from ...parallel.transport import Transport

        rank, stage = self.mesh.rank, self.worker.stage
        self.transport = Transport(self.groups, stage.arch.hidden_size, stage.dtype, self.setup.depth)
        device = self.groups.device
        self.reporter = _Reporter(self._send_result, self.inbox.put, device) if self.is_cuda else None
        self._report = self._send_result if self.reporter is None else self.reporter.report
        process = f"pid {os.getpid()} {device}"
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
            if failed is not None:  # outside `except`: the error's frames keep references
                self._let_go()  # so that ranks that wait for this one fail too
                self.client.send(encoder.encode(RankFailure(self.mesh.rank, self.mesh.stage, failed, secondary=True)))
        if self.transport is not None:
            if self.reporter is not None:
                self.reporter.close()
            self.transport.drain()
        self.worker.drop_graphs()
        self.groups.close()

    def _go_on(self) -> bool:
        """Process the next message. Return False on `Stop`."""
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
        """Prepare a message for the main thread, and hand it over."""
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
        """Return the next message, None on `Stop`. Micro-batches are dropped while disconnected from other ranks.

        Raises:
            Exception: an error from another thread.
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
        """Disconnect from the other ranks, dropping everything in flight.

        CUDA graphs are dropped first, since NCCL waits for them; then the communicators, since the device waits for
        them.

        Raises:
            RuntimeError: NCCL did not abort, or the device did not finish.
        """
        reporter, self.reporter, self.transport = self.reporter, None, None
        if reporter is not None:
            reporter.drop()
        self.worker.drop_graphs()
        self.groups.abort()
        if reporter is not None:
            reporter.join()

    def _rejoin(self, epoch: int) -> None:
        """Connect to the other ranks of a new epoch, keeping the weights."""
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
        """Once a micro-batch is computed, send its tokens to the coordinator and, on tp rank 0, the stage's span."""
        ready, begin, end = (self.clock.seconds(moment) for moment in (done.free, done.begin, done.end))
        arrived = done.heard if done.arrived is None else self.clock.seconds(done.arrived)
        number = done.message.micro_batch
        times = (ready, min(max(ready, arrived), begin), begin, end, max(end, done.sent))
        span = Span(number, self.mesh.stage, *times, *done.measured)
        sampled = None if done.sampled is None else done.sampled.read()
        spans = [] if self.mesh.tp_rank else [span]
        self.client.send(encoder.encode(MicroBatchResult(done.message.epoch, number, spans, sampled)))


class _Reporter:
    """Sends results from its own thread, which waits for the device while the main thread continues.

    Args:
        send: sends one result.
        fail: called with an error that `send` raised.
        device: the device to wait for.
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
        """Drop unsent results, and later errors. Call `join` once nothing keeps the device waiting."""
        self._is_dropped = True
        self._done.put(None)

    def join(self) -> None:
        """Wait for the thread to exit.

        Raises:
            RuntimeError: the device is still computing.
        """
        self._thread.join(waits.REPORT_S)
        if self._thread.is_alive():
            raise RuntimeError(
                f"{self._device} is still computing {waits.REPORT_S:g} s after its communicators were aborted"
            )

    def _run(self) -> None:
        import torch

        try:
            torch.cuda.set_device(self._device)  # else the thread would create a context on device 0
            while (done := self._done.get()) is not None:
                if not self._is_dropped:
                    self._send(done)
        except Exception as error:
            if not self._is_dropped:
                self._fail(error)
