"""The engine of a server: drives the coordinator with the requests that the HTTP front sends.

It is a process of its own, so that HTTP, JSON and detokenizing never hold the coordinator's interpreter lock.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

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
from ..ledger.running_ledger import RunningLedger
from ..ledger.running_stragglers import RunningStragglers
from ..pipeline.protocol import LivePipeline, PipelineError
from .live_spans import live_spans
from .messages import (
    TOKEN_BOUNDS,
    Abort,
    Failed,
    FromEngine,
    Record,
    Recorded,
    Recovery,
    Shutdown,
    Slow,
    Snapshot,
    Started,
    Starting,
    Submit,
    Tokens,
    Watch,
    Watched,
    encoder,
    to_engine,
)
from .recording import Recording

_SNAPSHOT_S = 0.25
_LONGEST_WAIT_S = 1.0


class ServingEngine:
    """Takes requests from `connection`, and sends what becomes of them.

    A request with a number that was aborted, or has ended, gets no further token.
    """

    def __init__(self, config: EngineConfig, plan: Plan, pipeline: LivePipeline, connection: FrameSocket) -> None:
        self._connection = connection
        self._readable = selectors.DefaultSelector()
        self._readable.register(connection.socket, selectors.EVENT_READ)
        self._core = EngineCore(config, {config.scheduler: plan}, pipeline)
        self._coordinator = self._core.coordinator
        self._ledger = RunningLedger(plan.limits.depth.most)
        self._stragglers = RunningStragglers()
        self._unfinished: dict[int, Request] = {}
        self._held: set[int] = set()  # numbers of requests whose structured outputs compile
        self._ready: list[Request] = []  # of those, whose structured outputs the ranks have now
        self._compiled: OrderedDict[StructuredOutputs, None] = OrderedDict()  # that the ranks have, the newest last
        self._is_closing = False
        self._watched: Recording | None = None  # while somebody looks
        self._recording: Recording | None = None
        self._tokens = self._preemptions = 0
        self._by_tokens = np.zeros(len(TOKEN_BOUNDS) + 1, np.int64)
        self._snapshot_at = 0.0
        self._known_faults = (0, False)  # how many, and whether the newest is under repair, as the front knows it

    def run(self) -> None:
        """Serve until the front asks for the end, or is gone.

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
        """Take what the front has sent, without waiting for it, and requests that were held."""
        while self._ready:
            request = self._ready.pop(0)
            self._use(request.params.structured_outputs)
            if request.id in self._held:  # else it was aborted
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
                elif isinstance(message, Watch):
                    self._watched = self._begin_recording() if message.is_on else None
                elif isinstance(message, Record):
                    self._record(message.is_on)
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
        """Take note that the ranks have compiled structured outputs and use them now. They keep as many as this."""
        if wanted is not None:
            self._compiled[wanted] = None
            self._compiled.move_to_end(wanted)
            if len(self._compiled) > MOST_COMPILED:
                self._compiled.popitem(last=False)

    def _admit(self, request: Request, ready: float | None = None) -> None:
        self._unfinished[request.id] = request
        for recording in (self._recording, self._watched):
            if recording is not None:
                recording.add(request.record)
        self._coordinator.add(request, ready)

    def _abort(self, numbers: list[int]) -> None:
        for number in numbers:
            self._held.discard(number)
            request = self._unfinished.get(number)
            if request is not None and not request.is_finished:
                self._coordinator.abort(request)
                self._preemptions += request.preemptions
                del self._unfinished[number]

    def _record(self, is_on: bool) -> None:
        """Begin to record, or end the window with the micro-batches that are dispatched already."""
        if is_on:
            self._recording = self._begin_recording()
            self._send(Recorded(self._recording.first_part(), False))
        elif self._recording is not None:
            self._recording.stop(self._coordinator.next_micro_batch, self._coordinator.clock.now())

    def _begin_recording(self) -> Recording:
        coordinator, unfinished = self._coordinator, [request.record for request in self._unfinished.values()]
        return Recording(coordinator.record, coordinator.next_micro_batch, unfinished, coordinator.clock.now())

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
        """Send the state, once in a while, `always`, or when a fault came or went; forget what the ledger counted."""
        now, faults = self._coordinator.clock.now(), self._coordinator.record.faults
        known = (len(faults), self._coordinator.is_recovering)
        if not always and now < self._snapshot_at and known == self._known_faults:
            return
        self._known_faults = known
        self._snapshot_at = now + _SNAPSHOT_S
        record, scheduler = self._coordinator.record, self._coordinator.scheduler
        record.requests = [request for request in record.requests if request.finished is None]
        if (counted := self._ledger.count(record)) is not None:
            ledger, first = counted
            self._stragglers.add(ledger, first, self._ledger.idle)
            tokens = ledger.micro_batches.tokens[first:]
            self._tokens += int(tokens.sum())
            self._by_tokens += np.bincount(np.searchsorted(TOKEN_BOUNDS, tokens), minlength=len(self._by_tokens))
            new = record.micro_batches[first : len(ledger.micro_batches.tokens)]
            if self._watched is not None:
                self._send(live_spans(ledger, first))
                for part in self._watched.take(new):
                    self._send(Watched(part))
            if self._recording is not None:
                for part in self._recording.take(new):
                    self._send(Recorded(part, False))
        if self._recording is not None and self._recording.is_complete(self._coordinator.has_work):
            self._send(Recorded(self._recording.last_part(), True))
            self._recording = None
        self._ledger.drop(record)
        cache = scheduler.pool.cache
        self._send(
            Snapshot(
                time=now,
                running=len(scheduler.running),
                waiting=scheduler.num_waiting + len(self._held),
                kv_blocks_used=scheduler.pool.num_used,
                tokens=self._tokens,
                by_tokens=self._by_tokens.tolist(),
                is_short_of_kv=scheduler.short_of_kv,
                preemptions=self._preemptions,
                prefix_queries=cache.queries if cache else 0,
                prefix_hits=cache.hits if cache else 0,
                busy=self._ledger.busy.tolist(),
                idle=self._ledger.idle.tolist(),
                ends=self._ledger.ends.tolist(),
                is_idle=not self._coordinator.has_work,
                recovery=Recovery.of(faults),
                slow=[Slow(each.stage, each.start, each.slowdown, each.waited) for each in self._stragglers.current],
                slow_seconds=self._stragglers.slow_seconds.tolist(),
                compute=self._ledger.compute.shares(),
            )
        )

    def _send(self, message: FromEngine) -> None:
        try:
            self._connection.send(DATA, encoder.encode(message))
        except OSError:
            self._is_closing = True


def run_engine(mapping: dict[str, Any], sock: socket.socket, environment: Mapping[str, str]) -> None:
    """Start a pipeline and serve it over `sock`: the whole of the engine's process.

    Args:
        mapping: the plain form of a `ServeConfig` that has been checked. A plan does not travel, since compiled classes
            cannot be pickled.
        sock: to the front.
        environment: variables to set first, such as the GPUs that this engine may see.
    """
    os.environ.update(environment)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the front decides, and tells us by its connection
    connection = FrameSocket(sock)

    def send(message: FromEngine) -> None:
        with suppress(OSError):
            connection.send(DATA, encoder.encode(message))

    pipeline = None
    try:
        config = build(ServeConfig, mapping)
        plan = make_plan(config, quiet=True)  # the front has logged it
        send(Starting(f"imports are done; ranks start by {config.parallel.started_by}"))
        pipeline = start_pipeline(config, plan, None, lambda text: send(Starting(text)))
        pipeline.wake_on(sock.fileno())
        send(Started(pipeline.where, pipeline.num_stages, pipeline.num_blocks))
        ServingEngine(config, plan, pipeline, connection).run()
    except (PipelineError, ConfigError) as error:
        send(Failed(str(error), isinstance(error, ConfigError)))
    except BaseException as error:
        send(Failed(f"{type(error).__name__}: {error}"))
        raise
    finally:
        if pipeline is not None:
            pipeline.close()
