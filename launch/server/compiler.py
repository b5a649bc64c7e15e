"""Writes and compiles grammars in a process of its own, so that none of them can hang or crash the server."""

from __future__ import annotations

import asyncio
import hashlib
import multiprocessing
import pickle
import signal
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, TypeVar

from ...conf.errors import ConfigError
from ...conf.structured_outputs import StructuredOutputs
from ...models.grammar import Grammars
from ...models.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from multiprocessing.context import SpawnProcess

_LONGEST_S = 1.0  # of processor time
LONGEST_WRITING_S = 4.0  # where the schema of each of many tools is compiled by itself
_START_S = 60.0
_ANSWER_S = 30.0  # on a machine that has other work
_MOST_KNOWN = 256
_MOST_BYTES = 64 << 20  # of requests whose answers are known
Model = tuple[str | None, int, tuple[int, ...]]  # tokenizer, vocabulary size, end-of-sequence tokens
T = TypeVar("T")
Task = Callable[[Grammars], T]  # a `partial` of a function at the top level of a module


class Compiler:
    """Does what needs grammars within a limit of time. Its process starts anew where one has ended."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._known: OrderedDict[bytes, tuple[int, object]] = OrderedDict()  # bytes of a request, its answer
        self._num_bytes = 0  # of requests that are known
        self._lock = asyncio.Lock()
        self._process: SpawnProcess | None = None
        self._connection: Connection | None = None

    async def check(self, wanted: StructuredOutputs) -> None:
        """Compile structured outputs, once each of those that come again soon.

        Raises:
            ConfigError: they are invalid, or too complex.
        """
        await self.ask(partial(Grammars.check, wanted=wanted), wanted.kind)

    async def ask(self, task: Task[T], kind: str, seconds: float = _LONGEST_S) -> T:
        """Return what `task` returns, from memory where it was asked for lately.

        Args:
            task: what to do.
            kind: which of the structured outputs it is for.
            seconds: of processor time that it may take.

        Raises:
            ConfigError: `task` raised it, or takes too long.
        """
        request = pickle.dumps(task)
        key = hashlib.sha256(request).digest()
        if key not in self._known:  # what is known never waits for what is being compiled
            async with self._lock:
                if key not in self._known:
                    answer = await asyncio.to_thread(self._do, request, kind, seconds)
                    self._known[key] = len(request), answer
                    self._num_bytes += len(request)
        self._known.move_to_end(key)
        _, answer = self._known[key]
        while len(self._known) > _MOST_KNOWN or self._num_bytes > _MOST_BYTES:
            self._num_bytes -= self._known.popitem(last=False)[1][0]
        return answer  # type: ignore[return-value]

    def start(self) -> None:
        """Start the process unless it runs, and wait until it can compile.

        Raises:
            ConfigError: the model's tokenizer does not allow structured outputs.
        """
        if self._process is not None and self._process.is_alive():
            return
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(theirs, self._model), name="compiler", daemon=True)
        self._process.start()
        theirs.close()
        self._answer(_START_S, "sampling.structured_outputs: their compiler does not start")

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None

    def _do(self, request: bytes, kind: str, seconds: float) -> object:
        self.start()
        assert self._connection is not None
        self._connection.send((request, seconds))
        text = f"too complex: it does not compile within {seconds:g} s; simplify it"
        return self._answer(_ANSWER_S, f"sampling.structured_outputs.{kind}: {text}")

    def _answer(self, seconds: float, otherwise: str) -> object:
        """Return what the process answers. Raise its error, or `otherwise` where nothing comes within `seconds`."""
        assert self._connection is not None
        error, answer = otherwise, None
        with suppress(EOFError, OSError):  # it crashed, as where a grammar is nested too deep
            if self._connection.poll(seconds):
                error, answer = self._connection.recv()
        if error == otherwise:
            self.close()
        if error:
            raise ConfigError(error)
        return answer


def _run(connection: Connection, model: Model) -> None:
    """Be the process: answer each request with an error, or "", and what its task returned."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    path, vocab_size, eos_token_ids = model
    try:
        grammars = Grammars(load_tokenizer(path, vocab_size), vocab_size, eos_token_ids)
    except ConfigError as error:
        connection.send((str(error), None))
        return
    connection.send(("", None))
    with suppress(EOFError, OSError):  # the server has ended
        while True:
            request, seconds = connection.recv()
            signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process
            answer = "", None
            try:
                answer = "", pickle.loads(request)(grammars)
            except ConfigError as raised:
                answer = str(raised), None
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send(answer)
