"""Builds and compiles grammars in a separate process, so that none can hang or crash the server."""

from __future__ import annotations

import asyncio
import hashlib
import pickle
from collections import OrderedDict
from collections.abc import Callable
from functools import cache, partial
from typing import TypeVar

from ...conf.errors import ConfigError
from ...conf.structured_outputs import StructuredOutputs
from ...models.grammar import Grammars
from ...models.limited_process import LimitedProcess, LimitError
from ...models.tokenizer import load_tokenizer

_LONGEST_S = 1.0  # of processor time
LONGEST_WRITING_S = 4.0  # if the schemas of many tools are compiled one by one
_START_S = 60.0
_MOST_KNOWN = 256
_MOST_BYTES = 64 << 20  # of cached requests
Model = tuple[str | None, int, tuple[int, ...]]  # tokenizer, vocabulary size, end-of-sequence tokens
T = TypeVar("T")
Task = Callable[[Grammars], T]  # a `partial` of a function at the top level of a module


class Compiler:
    """Runs grammar tasks with a time limit. Its process is restarted if it has ended."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._known: OrderedDict[bytes, tuple[int, object]] = OrderedDict()  # bytes of a request, its answer
        self._num_bytes = 0  # of cached requests
        self._lock = asyncio.Lock()
        self._process = LimitedProcess()

    async def check(self, wanted: StructuredOutputs) -> None:
        """Compile structured outputs; recent results are cached.

        Raises:
            ConfigError: they are invalid or too complex.
        """
        await self.ask(partial(Grammars.check, wanted=wanted), wanted.kind)

    async def ask(self, task: Task[T], kind: str, seconds: float = _LONGEST_S) -> T:
        """Run `task` in the process, or return its cached result.

        Args:
            task: the task.
            kind: the kind of structured output, for errors.
            seconds: limit of processor time.

        Raises:
            ConfigError: `task` raised it, or takes too long.
        """
        request = pickle.dumps(partial(_with_grammars, self._model, task))
        key = hashlib.sha256(request).digest()
        if key not in self._known:  # cached results never wait for a compilation
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
        """Start the process and wait until it can compile.

        Raises:
            ConfigError: the model's tokenizer does not allow structured outputs.
        """
        try:
            self._process.run(partial(_load, self._model), _START_S)
        except LimitError as error:
            raise ConfigError("sampling.structured_outputs: the grammar compiler did not start") from error

    def close(self) -> None:
        """End the process."""
        self._process.close()

    def _do(self, request: bytes, kind: str, seconds: float) -> object:
        self.start()
        try:
            return self._process.run(request, seconds)
        except LimitError as error:
            text = f"too complex: the grammar did not compile within {seconds:g} s; simplify it"
            raise ConfigError(f"sampling.structured_outputs.{kind}: {text}") from error


@cache
def _grammars(model: Model) -> Grammars:
    path, vocab_size, eos_token_ids = model
    return Grammars(load_tokenizer(path, vocab_size), vocab_size, eos_token_ids)


def _load(model: Model) -> None:
    _ = _grammars(model)


def _with_grammars(model: Model, task: Task[T]) -> T:
    return task(_grammars(model))
