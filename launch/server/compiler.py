"""Compiles structured outputs in a process of its own, so that none of them can hang or crash the server."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
from collections import OrderedDict
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from ...conf.errors import ConfigError
from ...conf.structured_outputs import StructuredOutputs
from ...models.grammar import Grammars
from ...models.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from multiprocessing.context import SpawnProcess

# Of processor time. The last stage compiles it too, and streams of the same micro-batch wait for that.
_LONGEST_S = 1.0
_START_S = 60.0
_ANSWER_S = 30.0  # on a machine that has other work
_MOST_KNOWN = 256
Model = tuple[str | None, int, tuple[int, ...]]  # tokenizer, vocabulary size, end-of-sequence tokens


class Compiler:
    """Checks that structured outputs compile within a limit of time. Its process starts anew where one has ended."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._known: OrderedDict[StructuredOutputs, None] = OrderedDict()
        self._lock = asyncio.Lock()
        self._process: SpawnProcess | None = None
        self._connection: Connection | None = None

    async def check(self, wanted: StructuredOutputs) -> None:
        """Compile structured outputs, once each of those that come again soon.

        Raises:
            ConfigError: they are invalid, or too complex.
        """
        if wanted in self._known:  # what is known never waits for what is being compiled
            self._known.move_to_end(wanted)
            return
        async with self._lock:
            if wanted not in self._known:
                await asyncio.to_thread(self._compile, wanted)
                self._known[wanted] = None
            if len(self._known) > _MOST_KNOWN:
                self._known.popitem(last=False)

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

    def _compile(self, wanted: StructuredOutputs) -> None:
        self.start()
        assert self._connection is not None
        self._connection.send(wanted)
        text = f"too complex: it does not compile within {_LONGEST_S:g} s; simplify it"
        self._answer(_ANSWER_S, f"sampling.structured_outputs.{wanted.kind}: {text}")

    def _answer(self, seconds: float, otherwise: str) -> None:
        """Raise the error that the process answers, or `otherwise` where there is no answer within `seconds`."""
        assert self._connection is not None
        error = otherwise
        with suppress(EOFError, OSError):  # it crashed, as where a grammar is nested too deep
            if self._connection.poll(seconds):
                error = self._connection.recv()
        if error == otherwise:
            self.close()
        if error:
            raise ConfigError(error)


def _run(connection: Connection, model: Model) -> None:
    """Be the process: answer each of the structured outputs with what is wrong with it, or nothing."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    path, vocab_size, eos_token_ids = model
    try:
        grammars = Grammars(load_tokenizer(path, vocab_size), vocab_size, eos_token_ids)
    except ConfigError as error:
        connection.send(str(error))
        return
    connection.send("")
    with suppress(EOFError, OSError):  # the server has ended
        while True:
            wanted = connection.recv()
            signal.setitimer(signal.ITIMER_PROF, _LONGEST_S)  # its signal ends the process
            wrong = ""
            try:
                grammars.matcher(wanted)
            except ConfigError as raised:
                wrong = str(raised)
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send(wrong)
