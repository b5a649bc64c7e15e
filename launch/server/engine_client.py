"""Engine client of the HTTP front: starts the engine process, sends requests, and delivers tokens to waiting calls."""

from __future__ import annotations

import asyncio
import itertools
import logging
import multiprocessing
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

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
from ...runtime.serving.observer import Observer
from ..installed import has_analysis
from ..stderr_log import as_configured, messages_on_stderr
from .prometheus import Metrics

M = TypeVar("M", bound=FromEngine)
State = Literal["starting", "ready", "recovering", "draining", "failed", "closed"]
TAKES_REQUESTS: tuple[State, ...] = ("ready", "recovering")  # requests wait while the pipeline recovers
_CLOSE_S = 15.0  # for the ranks to exit


class TokenTimes(Protocol):
    """Counts tokens by latency (TTFT and TBT)."""

    def first_token(self, ttft: float) -> None:
        """Count a request's first token, `ttft` seconds after its arrival."""
        ...

    def next_token(self, seconds: float) -> None:
        """Count a token that arrived `seconds` after the previous one."""
        ...


class EngineError(RuntimeError):
    """The engine cannot answer: it is starting, failed or gone."""


@dataclass(slots=True)
class Delta:
    """An update of one output of a call: a token and the text that became final with it, the output's end, or both.

    `token` is None if the output ended without one. `cached_tokens`, the prompt's prefix-cache hits, and requested
    `prompt_logprobs` come with the first token.
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
    """The outputs of one HTTP request, and their pending updates.

    `prompt_logprobs`, by output, are set if they were requested. `on_settled` is called once the client has the answer
    or an error of its own, or has disconnected.

    Attributes:
        user: user whose fair share the outputs consume.
        cache_salt: only requests with the same salt share KV blocks.
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
        """Wait for updates and return them.

        Raises:
            Exception: the error passed to `fail`; no updates follow.
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
        """Add an update and wake the waiter."""
        self._news.append(delta)
        self._wake()

    def fail(self, error: Exception) -> None:
        """Make the next wait for updates raise `error`."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _Generation:
    """An engine request: one output of a call."""

    __slots__ = ("call", "first", "index", "last", "outstanding", "prefill", "prompt", "text")

    def __init__(
        self, call: Call, index: int, text: OutputText, prompt: Sequence[int], num_output: int, max_tokens: int
    ) -> None:
        self.call = call
        self.index = index
        self.text = text
        self.prompt = prompt
        self.prefill = len(prompt) + num_output  # tokens to compute before the first new one
        self.outstanding = len(prompt) + max_tokens  # prompt and output tokens not computed yet
        self.first: float | None = None  # when its first token came
        self.last: float | None = None  # when its newest token came


class EngineClient:
    """Runs the engine in a separate process.

    Attributes:
        state: the engine's state; `reason` describes it.
        snapshot: the newest state of the pipeline, None before the first.
        outstanding_tokens: upper bound of the prompt and output tokens that unfinished requests still need.
        num_blocks: KV blocks of the pipeline.
        token_times: is told of the tokens' times; None: nothing counts them.

    Args:
        replica: index of this engine among the replicas.
        numbers: source of request numbers, shared by all replicas.
        changed: set whenever the state changes; shared by all replicas.
        environment: additional environment variables of the engine's process.
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
        self.reason = "the engine process is starting"
        self.started: Started | None = None
        self.snapshot: Snapshot | None = None
        self.error: Failed | None = None
        self.changed = changed or asyncio.Event()
        metrics.ready[replica] = False
        self.num_blocks = metrics.num_blocks
        self.token_times: TokenTimes | None = None
        self._listeners: dict[type, Callable[[Any, bytes], None]] = {}

    def listen(self, kind: type[M], listener: Callable[[M, bytes], None]) -> None:
        """Register `listener` for messages of a kind. It gets each message and its bytes."""
        self._listeners[kind] = listener

    @property
    def replicas(self) -> Sequence[EngineClient]:
        """A list of itself, for symmetry with `ReplicaSet`."""
        return [self]

    @property
    def num_waiting(self) -> int:
        """Requests without a token yet."""
        return self._num_waiting

    @property
    def num_unfinished(self) -> int:
        """The number of unfinished engine requests; each output is one."""
        return len(self._generations)

    async def start(self) -> None:
        """Start the engine's process; `state` shows its progress."""
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
            call: receives the updates.
            prompt: token ids.
            params: sampling parameters of each output.

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
        """Continue an output of `call` that an earlier engine began; `text` contains its tokens so far.

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
        """Abort these requests, unless they are finished."""
        unfinished = [number for number in numbers if number in self._generations]
        for number in unfinished:
            self._end(number, "abort")
        if unfinished:
            self._send(Abort(unfinished))

    def watch(self, is_on: bool) -> None:
        """Turn the stream of `LiveSpans` on or off."""
        self._send(Watch(is_on))

    def record(self, is_on: bool) -> None:
        """Start or stop a recording; its parts arrive as `Recorded`."""
        self._send(Record(is_on))

    def drain(self) -> None:
        """Accept no more requests; running ones continue."""
        if self.state in ("starting", *TAKES_REQUESTS):
            self._become("draining", "the server is shutting down")

    async def close(self) -> None:
        """Shut down the engine and its ranks, by force after a timeout."""
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
        """Handle one encoded message from the engine."""
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
                self._become("ready", "requests are accepted")
        elif isinstance(message, Failed):
            self.error = message
            self._fail(message.error)
        if (listener := self._listeners.get(type(message))) is not None:
            listener(message, payload)

    def _take_recovery(self, message: Snapshot) -> None:
        if self.state in TAKES_REQUESTS and message.is_recovering:
            reason = f"the pipeline is recovering; requests wait: {message.recovery.fault}"
            if reason != self.reason:
                self._become("recovering", reason)
                self._on_state(logging.WARNING, reason)
        elif self.state == "recovering" and not message.is_recovering:
            self._become("ready", "requests are accepted")
            self._on_state(logging.WARNING, "the pipeline has recovered")

    def lost(self) -> None:
        """Fail all requests, because the engine process died."""
        if self.state not in ("failed", "closed"):
            self._fail("the engine process died")

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
                    if self.token_times is not None:
                        self.token_times.first_token(message.time - generation.call.arrival)
                else:
                    metrics.next_token(message.time - generation.last)
                    if self.token_times is not None:
                        self.token_times.next_token(message.time - generation.last)
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
    """Entry point of the engine process."""
    observe: Callable[[int], Observer] | None = None
    if has_analysis():
        from ...runtime.analysis.live.ledger_observer import LedgerObserver

        observe = LedgerObserver

    serve = mapping["serve"]
    with messages_on_stderr(), as_configured(serve["log_level"], serve["log_format"]):
        run_engine(mapping, sock, environment, observe)


class _Frames(asyncio.Protocol):
    """Reassembles the engine's frames."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._frames = FrameBuffer()

    def data_received(self, data: bytes) -> None:
        for _, payload in self._frames.feed(data):
            self._client.receive(payload)

    def connection_lost(self, error: Exception | None) -> None:
        self._client.lost()
