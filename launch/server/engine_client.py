"""The front's side of the engine: starts its process, sends requests, hands tokens to those who wait for them."""

from __future__ import annotations

import asyncio
import itertools
import logging
import multiprocessing
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from ...conf.build import to_mapping
from ...conf.sampling import SamplingParams
from ...conf.schema import ServeConfig
from ...models.tokenizer import Tokenizer
from ...parallel.frames import DATA, FrameBuffer, pack
from ...runtime.engine.output_text import OutputText, named_prompt
from ...runtime.engine.outputs import CompletionOutput, Logprob
from ...runtime.serving.engine import run_engine
from ...runtime.serving.messages import (
    Abort,
    Failed,
    FromEngine,
    Record,
    Shutdown,
    Snapshot,
    Started,
    Starting,
    Submit,
    ToEngine,
    Tokens,
    Watch,
    encoder,
    from_engine,
)
from ..stderr_log import as_configured, messages_on_stderr
from .last_minute import LastMinute
from .prometheus import Metrics

M = TypeVar("M", bound=FromEngine)
State = Literal["starting", "ready", "recovering", "draining", "failed", "closed"]
TAKES_REQUESTS: tuple[State, ...] = ("ready", "recovering")  # they wait while the pipeline is repaired
_CLOSE_S = 15.0  # for the ranks to end


class EngineError(RuntimeError):
    """The engine cannot answer: it is starting, failed or gone."""


@dataclass(slots=True)
class Delta:
    """News of one output of a call: a token and the text that became final with it, its end, or both.

    `token` is None where the output ended without one. `cached_tokens` of the prompt were found in the prefix cache;
    the first token brings that number, and `prompt_logprobs`, if they were asked for.
    """

    index: int
    text: str
    token: int | None
    logprobs: dict[int, Logprob] | None
    finish_reason: str | None
    stop_reason: str | int | None
    cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


class Call:
    """The outputs of one HTTP request, and the news of them that nobody has taken yet.

    `prompt_logprobs`, by output: those of its prompt, where they were asked for. `on_settled` is called once nobody
    waits for the answer any more: the client has it, or an error of its own, or has left.

    Attributes:
        user: whose share of the engine the outputs take.
        cache_salt: only requests of the same one share KV blocks.
        deadline: when the first token is due, on this process's monotonic clock, in seconds.
        priority: lower is more urgent.
    """

    def __init__(self, has_structured_outputs: bool = False) -> None:
        self.has_structured_outputs = has_structured_outputs
        self.outputs: list[CompletionOutput] = []
        self.prompt_logprobs: dict[int, list[dict[int, Logprob] | None]] = {}
        self.arrival = time.monotonic()
        self.user, self.cache_salt, self.priority = "", "", 0
        self.deadline: float | None = None
        self.first: float | None = None  # when the first token of any output came
        self.on_settled: Callable[[], None] = lambda: None
        self._news: list[Delta] = []
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None

    async def next(self) -> list[Delta]:
        """Wait for news and return them.

        Raises:
            Exception: what `fail` was given; no more will come.
        """
        while not self._news:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        news, self._news = self._news, []
        return news

    @property
    def finished(self) -> bool:
        """Whether every output has ended."""
        return all(output.finished for output in self.outputs)

    def push(self, delta: Delta) -> None:
        """Add a token's news, and wake the one that waits for it."""
        self._news.append(delta)
        self._wake()

    def fail(self, error: Exception) -> None:
        """Have the next wait for news raise `error`."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _Generation:
    """A request of the engine: one output of a call."""

    __slots__ = ("call", "first", "index", "last", "outstanding", "prefill", "prompt", "text")

    def __init__(
        self, call: Call, index: int, text: OutputText, prompt: Sequence[int], num_output: int, max_tokens: int
    ) -> None:
        self.call = call
        self.index = index
        self.text = text
        self.prompt = prompt
        self.prefill = len(prompt) + num_output  # tokens that the first new one needs
        self.outstanding = len(prompt) + max_tokens  # tokens that are not computed yet, of prompt and output
        self.first: float | None = None  # when its first token came
        self.last: float | None = None  # when its newest token came


class EngineClient:
    """Runs the engine in a process of its own.

    Attributes:
        state: what the engine does; `reason` says it in words.
        snapshot: the newest state of the pipeline, None before the first.
        outstanding_tokens: of unfinished requests, prompt tokens without an output yet and output tokens to come, at
            most.
        last_minute: what it did, second by second.

    Args:
        replica: which of several engines it is.
        numbers: where requests get their numbers; several engines share it.
        changed: set when the engine is ready, and when it is gone; several engines share it.
        environment: variables of the engine's process, beside this one's.
    """

    def __init__(
        self,
        config: ServeConfig,
        tokenizer: Tokenizer,
        metrics: Metrics,
        on_state: Callable[[int, str], None],
        *,
        replica: int = 0,
        numbers: Iterator[int] | None = None,
        changed: asyncio.Event | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._on_state = on_state
        self._replica = replica
        self._environment = dict(environment or {})
        self._numbers = numbers or itertools.count()
        self._generations: dict[int, _Generation] = {}
        self._num_waiting = 0
        self.outstanding_tokens = 0
        self._process: multiprocessing.process.BaseProcess | None = None
        self._transport: asyncio.Transport | None = None
        self.state: State = "starting"
        self.reason = "the engine's process is starting"
        self.started: Started | None = None
        self.snapshot: Snapshot | None = None
        self.error: Failed | None = None
        self.changed = changed or asyncio.Event()
        metrics.ready[replica] = False
        self.last_minute = LastMinute(metrics.num_blocks, time.monotonic())
        self._listeners: dict[type, Callable[[Any, bytes], None]] = {}

    def listen(self, kind: type[M], listener: Callable[[M, bytes], None]) -> None:
        """Have `listener` called with each message of a kind and its bytes, before anybody sees what it changed."""
        self._listeners[kind] = listener

    @property
    def replicas(self) -> Sequence[EngineClient]:
        """Itself, as a `ReplicaSet` has several."""
        return [self]

    @property
    def num_waiting(self) -> int:
        """Requests without a token yet."""
        return self._num_waiting

    @property
    def num_unfinished(self) -> int:
        """The number of requests in the engine that have not ended; each output is one."""
        return len(self._generations)

    async def start(self) -> None:
        """Start the engine's process; `state` says how far it is."""
        ours, theirs = socket.socketpair()
        context = multiprocessing.get_context("spawn")
        arguments = (to_mapping(self._config), theirs, self._environment)
        self._process = context.Process(target=_run_engine, args=arguments, name="engine")
        self._process.start()
        theirs.close()
        self._transport, _ = await asyncio.get_running_loop().create_connection(lambda: _Frames(self), sock=ours)

    def submit(self, call: Call, prompt: Sequence[int], params: Sequence[SamplingParams]) -> list[int]:
        """Send a prompt to the engine, once for each of `params`; they become the next outputs of `call`.

        Args:
            call: is told of all that comes of them.
            prompt: token ids.
            params: of each output.

        Returns:
            The requests' numbers, for `abort`.

        Raises:
            EngineError: the engine is not ready.
        """
        if self.state not in TAKES_REQUESTS:
            raise EngineError(self.reason)
        numbers = []
        for each in params:
            completion = CompletionOutput(len(call.outputs))
            call.outputs.append(completion)
            numbers.append(next(self._numbers))
            text = OutputText(completion, each, self._tokenizer)
            self._submit(call, numbers[-1], text, prompt, each)
        self._metrics.accepted(len(prompt), len(numbers))
        return numbers

    def resume(self, call: Call, number: int, text: OutputText, prompt: Sequence[int], params: SamplingParams) -> None:
        """Send an output of `call` to the engine that an engine before it has begun: `text` holds its tokens so far.

        Raises:
            EngineError: the engine is not ready.
        """
        if self.state not in TAKES_REQUESTS:
            raise EngineError(self.reason)
        self._submit(call, number, text, prompt, params)
        self._metrics.accepted(len(prompt), 1)

    def _submit(self, call: Call, number: int, text: OutputText, prompt: Sequence[int], params: SamplingParams) -> None:
        output = text.completion
        generation = _Generation(call, output.index, text, prompt, len(output.token_ids), params.max_tokens)
        self._generations[number] = generation
        self.outstanding_tokens += generation.outstanding
        self._num_waiting += 1
        of_call = call.arrival, call.user, call.cache_salt, call.deadline
        self._send(Submit(number, list(prompt), params, *of_call, list(output.token_ids), call.priority))

    def abort(self, numbers: Sequence[int]) -> None:
        """End what is unfinished of these requests; nobody waits for them."""
        unfinished = [number for number in numbers if number in self._generations]
        for number in unfinished:
            self._end(number, "abort")
        if unfinished:
            self._send(Abort(unfinished))

    def watch(self, is_on: bool) -> None:
        """Say whether somebody wants the `LiveSpans`."""
        self._send(Watch(is_on))

    def record(self, is_on: bool) -> None:
        """Begin a recording, or end it; its parts come as `Recorded`."""
        self._send(Record(is_on))

    def drain(self) -> None:
        """Take no more requests; those that run go on."""
        if self.state in ("starting", *TAKES_REQUESTS):
            self._become("draining", "the server is shutting down")

    async def close(self) -> None:
        """End the engine and its ranks, whatever they do."""
        if self.state != "failed":
            self._become("closed", "the server is shut down")
        if self._transport is not None:
            self._send(Shutdown())
            self._transport.close()
        if self._process is not None:
            deadline = time.monotonic() + _CLOSE_S
            while self._process.is_alive() and time.monotonic() < deadline:
                await asyncio.sleep(0.05)
            if self._process.is_alive():
                self._process.kill()
            self._process.join()

    def receive(self, payload: bytes) -> None:
        """Take one message of the engine, encoded as it came."""
        message = from_engine.decode(payload)
        if isinstance(message, Tokens):
            self._take_tokens(message)
        elif isinstance(message, Snapshot):
            self.snapshot = message
            self._metrics.snapshots[self._replica] = message
            self._take_recovery(message)
        elif isinstance(message, Starting):
            if message.text != self.reason:
                self._on_state(logging.INFO, message.text)
            if self.state == "starting":
                self.reason = message.text
        elif isinstance(message, Started):
            self.started = message
            if self.state == "starting":
                self._become("ready", "requests are taken")
        elif isinstance(message, Failed):
            self.error = message
            self._fail(message.error)
        if (listener := self._listeners.get(type(message))) is not None:
            listener(message, payload)

    def _take_recovery(self, message: Snapshot) -> None:
        if self.state in TAKES_REQUESTS and message.is_recovering:
            reason = f"the pipeline recovers, and requests wait: {message.recovery.fault}"
            if reason != self.reason:
                self._become("recovering", reason)
                self._on_state(logging.WARNING, reason)
        elif self.state == "recovering" and not message.is_recovering:
            self._become("ready", "requests are taken")
            self._on_state(logging.WARNING, "the pipeline has recovered")

    def lost(self) -> None:
        """Fail all requests, since the engine's process has ended without being told to."""
        if self.state not in ("failed", "closed"):
            self._fail("the engine's process has died")

    def _become(self, state: State, reason: str) -> None:
        self.state, self.reason = state, reason
        self._metrics.ready[self._replica] = state == "ready"
        self.changed.set()

    def _fail(self, error: str) -> None:
        self._become("failed", error)
        self._on_state(logging.ERROR, error)
        generations, self._generations = self._generations, {}
        self._num_waiting = self.outstanding_tokens = 0
        self._metrics.snapshots.pop(self._replica, None)
        for generation in generations.values():
            generation.call.fail(EngineError(error))

    def _take_tokens(self, message: Tokens) -> None:
        metrics = self._metrics
        stopped: list[int] = []
        for place, (number, token) in enumerate(zip(message.numbers, message.tokens, strict=True)):
            generation = self._generations.get(number)
            if generation is None:  # it was aborted
                continue
            text, ended = generation.text, message.reasons.get(place)
            sampled = token if token >= 0 else None
            if sampled is not None:
                computed = 1 if generation.last is not None else 1 + generation.prefill
                generation.outstanding -= computed
                self.outstanding_tokens -= computed
                if generation.last is None:
                    self._num_waiting -= 1
                    text.completion.cached_tokens += message.cached.get(place, 0)
                    generation.first = message.time
                    generation.call.first = generation.call.first or message.time
                    metrics.first_token(generation.call.arrival, message.dispatched.get(place), message.time)
                    self.last_minute.first_token(message.time - generation.call.arrival)
                else:
                    metrics.next_token(message.time - generation.last)
                    self.last_minute.next_token(message.time - generation.last)
                generation.last = message.time
            piece, reason = text.add(sampled, message.logprobs.get(place), ended)
            if reason is not None:
                self._forget(number, reason)
                if ended is None:
                    stopped.append(number)
            out = text.completion
            logprobs = out.logprobs[-1] if out.logprobs and sampled is not None else None
            cached = message.cached.get(place, 0)
            delta = Delta(generation.index, piece, sampled, logprobs, reason, out.stop_reason, cached)
            if (of_prompt := message.prompt_logprobs.get(place)) is not None:
                delta.prompt_logprobs = named_prompt(self._tokenizer, generation.prompt, of_prompt)
                generation.call.prompt_logprobs[generation.index] = delta.prompt_logprobs
            generation.call.push(delta)
        if stopped:
            self._send(Abort(stopped))

    def _end(self, number: int, reason: str) -> None:
        generation = self._generations[number]
        generation.text.finish(reason)
        self._forget(number, reason)

    def _forget(self, number: int, reason: str) -> None:
        generation = self._generations.pop(number)
        self.outstanding_tokens -= generation.outstanding
        if generation.last is None:
            self._num_waiting -= 1
        decoding = None if generation.first is None else (generation.last or 0.0) - generation.first
        self._metrics.ended(reason, time.monotonic() - generation.call.arrival, decoding)

    def _send(self, message: ToEngine) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(pack(DATA, encoder.encode(message)))


def _run_engine(mapping: dict[str, Any], sock: socket.socket, environment: Mapping[str, str]) -> None:
    """Be the engine's process."""
    serve = mapping["serve"]
    with messages_on_stderr(), as_configured(serve["log_level"], serve["log_format"]):
        run_engine(mapping, sock, environment)


class _Frames(asyncio.Protocol):
    """Puts the engine's frames together."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._frames = FrameBuffer()

    def data_received(self, data: bytes) -> None:
        for _, payload in self._frames.feed(data):
            self._client.receive(payload)

    def connection_lost(self, error: Exception | None) -> None:
        self._client.lost()
