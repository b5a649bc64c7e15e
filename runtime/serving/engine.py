"""The server's engine process: drives the coordinator with requests from the HTTP front end.

It is a separate process, so that HTTP, JSON and detokenization never hold the coordinator's GIL.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from ...conf.build import build
from ...conf.errors import ConfigError
from ...conf.schema import EngineConfig, ServeConfig
from ...conf.structured_outputs import StructuredOutputs
from ...models.grammar import MOST_COMPILED
from ...parallel.frames import DATA, ConnectionLost, FrameSocket
from ..core.messages import TokenLogprobs
from ..core.request import Request
from ..engine.coordinator import TokenEvent
from ..engine.engine_core import EngineCore
from ..engine.plan import Plan, make_plan
from ..engine.start import start_pipeline
from ..pipeline.protocol import LivePipeline, PipelineError
from .messages import (
    Abort,
    Failed,
    FromEngine,
    Record,
    Recovery,
    Shutdown,
    Snapshot,
    Started,
    Starting,
    Submit,
    Tokens,
    Watch,
    encoder,
    to_engine,
)
from .observer import Observer

_SNAPSHOT_S = 0.25
_LONGEST_WAIT_S = 1.0


class ServingEngine:
    """Receives requests from `connection`, and sends back their tokens.

    Aborted or finished requests get no further tokens.
    """

    def __init__(
        self,
        config: EngineConfig,
        plan: Plan,
        pipeline: LivePipeline,
        connection: FrameSocket,
        observer: Observer | None = None,
    ) -> None:
        self._connection = connection
        self._readable = selectors.DefaultSelector()
        self._readable.register(connection.socket, selectors.EVENT_READ)
        self._core = EngineCore(config, {config.scheduler: plan}, pipeline)
        self._coordinator = self._core.coordinator
        self._observer = observer or Observer()
        self._unfinished: dict[int, Request] = {}
        self._held: set[int] = set()  # numbers of requests whose structured outputs are being compiled
        self._ready: list[Request] = []  # requests whose structured outputs have been compiled
        self._compiled: OrderedDict[StructuredOutputs, None] = OrderedDict()  # as in the ranks' LRU cache, newest last
        self._is_closing = False
        self._preemptions = 0
        self._snapshot_at = 0.0
        self._known_faults = (0, False)  # as last sent: their count, and whether the newest is under repair

    def run(self) -> None:
        """Serve until the front end requests shutdown or disconnects.

        Raises:
            PipelineError: the pipeline failed.
        """
        coordinator = self._coordinator
        while not self._is_closing:
            if not coordinator.has_work and not coordinator.is_recovering:
                self._snapshot(always=True)
                coordinator.collect(coordinator.clock.now() + _LONGEST_WAIT_S)  # a rank may die meanwhile
                self._receive()
                continue
            events = coordinator.step(coordinator.clock.now() + _LONGEST_WAIT_S, self._receive)
            if events:
                self._send_tokens(events)
            coordinator.check_progress()
            self._snapshot()

    def _receive(self) -> None:
        """Admit held requests that are ready, and process pending messages from the front end, without blocking."""
        while self._ready:
            request = self._ready.pop(0)
            self._use(request.params.structured_outputs)
            if request.id in self._held:  # otherwise it was aborted
                self._held.remove(request.id)
                self._admit(request, self._coordinator.clock.now())
        while self._readable.select(0):
            try:
                frames = self._connection.receive_once()
            except ConnectionLost:
                self._is_closing = True
                return
            for _, payload in frames:
                message = to_engine.decode(payload)
                if isinstance(message, Submit):
                    self._add(message)
                elif isinstance(message, Abort):
                    self._abort(message.numbers)
                elif isinstance(message, Watch | Record):
                    unfinished = [request.record for request in self._unfinished.values()]
                    for told in self._observer.ask(message, self._coordinator, unfinished):
                        self._send(told)
                else:
                    assert isinstance(message, Shutdown)
                    self._is_closing = True

    def _add(self, message: Submit) -> None:
        request = self._core.make_request(
            message.number,
            message.prompt,
            message.params,
            message.arrival,
            user=message.user,
            cache_salt=message.cache_salt,
            deadline=message.deadline,
            priority=message.priority,
            output=message.output,
        )
        wanted = message.params.structured_outputs
        if wanted is None or wanted in self._compiled:
            self._use(wanted)
            self._admit(request)
        else:
            self._held.add(request.id)
            self._core.pipeline.compile(wanted, partial(self._ready.append, request))

    def _use(self, wanted: StructuredOutputs | None) -> None:
        """Mark compiled structured outputs as just used. This mirrors the LRU cache of the ranks."""
        if wanted is not None:
            self._compiled[wanted] = None
            self._compiled.move_to_end(wanted)
            if len(self._compiled) > MOST_COMPILED:
                self._compiled.popitem(last=False)

    def _admit(self, request: Request, ready: float | None = None) -> None:
        self._unfinished[request.id] = request
        self._observer.admit(request.record)
        self._coordinator.add(request, ready)

    def _abort(self, numbers: list[int]) -> None:
        for number in numbers:
            self._held.discard(number)
            request = self._unfinished.get(number)
            if request is not None and not request.is_finished:
                self._coordinator.abort(request)
                self._preemptions += request.preemptions
                del self._unfinished[number]

    def _send_tokens(self, events: list[TokenEvent]) -> None:
        numbers: list[int] = []
        tokens: list[int] = []
        reasons: dict[int, str] = {}
        logprobs: dict[int, TokenLogprobs] = {}
        dispatched: dict[int, float] = {}
        cached: dict[int, int] = {}
        prompts: dict[int, list[TokenLogprobs]] = {}
        for place, event in enumerate(events):
            request = event.request
            numbers.append(request.id)
            tokens.append(-1 if event.token is None else event.token)
            if request.num_output == 1 and request.record.first_dispatched is not None:
                dispatched[place] = request.record.first_dispatched
                if request.record.cached_tokens:
                    cached[place] = request.record.cached_tokens
                if request.prompt_logprobs is not None:
                    prompts[place] = request.prompt_logprobs
            if event.is_last:
                assert request.finish_reason is not None, request
                reasons[place] = request.finish_reason
                self._preemptions += request.preemptions
                del self._unfinished[request.id]
            if event.logprobs is not None:
                logprobs[place] = event.logprobs
        self._send(Tokens(numbers, tokens, reasons, logprobs, dispatched, cached, events[0].time, prompts))

    def _snapshot(self, always: bool = False) -> None:
        """Send observations and the state: periodically, after a new or repaired fault, or `always`."""
        now, faults = self._coordinator.clock.now(), self._coordinator.record.faults
        known = (len(faults), self._coordinator.is_recovering)
        if not always and now < self._snapshot_at and known == self._known_faults:
            return
        self._known_faults = known
        self._snapshot_at = now + _SNAPSHOT_S
        record, scheduler = self._coordinator.record, self._coordinator.scheduler
        record.requests = [request for request in record.requests if request.finished is None]
        for message in self._observer.take(self._coordinator):
            self._send(message)
        cache = scheduler.pool.cache
        snapshot = Snapshot(
            time=now,
            running=len(scheduler.running),
            waiting=scheduler.num_waiting + len(self._held),
            kv_blocks_used=scheduler.pool.num_used,
            is_short_of_kv=scheduler.short_of_kv,
            preemptions=self._preemptions,
            prefix_queries=cache.queries if cache else 0,
            prefix_hits=cache.hits if cache else 0,
            is_idle=not self._coordinator.has_work,
            recovery=Recovery.of(faults),
        )
        self._send(self._observer.completed(snapshot))

    def _send(self, message: FromEngine) -> None:
        try:
            self._connection.send(DATA, encoder.encode(message))
        except OSError:
            self._is_closing = True


def run_engine(
    mapping: dict[str, Any],
    sock: socket.socket,
    environment: Mapping[str, str],
    observe: Callable[[int], Observer] | None = None,
) -> None:
    """Start a pipeline and serve it over `sock`: the main function of the engine process.

    Args:
        mapping: the plain form of a checked `ServeConfig`. The plan is made again here, since compiled classes cannot
            be pickled.
        sock: connected to the front end.
        environment: variables to set first, such as the GPUs visible to this engine.
        observe: makes the observer, given the pipeline depth; None: the run is not observed.
    """
    os.environ.update(environment)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the front end decides, and signals it through the connection
    connection = FrameSocket(sock)

    def send(message: FromEngine) -> None:
        with suppress(OSError):
            connection.send(DATA, encoder.encode(message))

    pipeline = None
    try:
        config = build(ServeConfig, mapping)
        plan = make_plan(config, quiet=True)  # the front end has logged it
        send(Starting(f"imports are done; ranks start by {config.parallel.started_by}"))
        pipeline = start_pipeline(config, plan, None, lambda text: send(Starting(text)))
        pipeline.wake_on(sock.fileno())
        send(Started(pipeline.where, pipeline.num_stages, pipeline.num_blocks))
        observer = None if observe is None else observe(plan.limits.depth.most)
        ServingEngine(config, plan, pipeline, connection, observer).run()
    except (PipelineError, ConfigError) as error:
        send(Failed(str(error), isinstance(error, ConfigError)))
    except BaseException as error:
        send(Failed(f"{type(error).__name__}: {error}"))
        raise
    finally:
        if pipeline is not None:
            pipeline.close()
