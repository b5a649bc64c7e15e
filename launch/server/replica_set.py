"""Several engines behind one front, each with its own pipeline (data parallelism)."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence

from ...conf.sampling import SamplingParams
from ...conf.schema import ServeConfig
from ...models.tokenizer import Tokenizer
from ...runtime.engine.output_text import OutputText
from ...runtime.serving.messages import Failed
from .engine_client import TAKES_REQUESTS, Call, EngineClient, EngineError, State
from .prometheus import Metrics
from .replica_share import share_of
from .router import Router


class ReplicaSet:
    """Has the interface of `EngineClient`, for `serve.replicas` engines.

    It accepts requests while any engine does. If an engine dies, its unfinished requests fail; the others continue.
    """

    def __init__(
        self,
        config: ServeConfig,
        tokenizer: Tokenizer,
        metrics: Metrics,
        on_state: Callable[[int, str], None],
        *,
        kv_tokens: int,
        numbers: Iterator[int] | None = None,
    ) -> None:
        numbers = numbers or itertools.count()
        self.changed = asyncio.Event()  # set when the state of an engine changes
        self.replicas: list[EngineClient] = []
        for number in range(config.serve.replicas):
            own, environment = share_of(config, number)

            def say(level: int, text: str, number: int = number) -> None:
                on_state(level, f"replica {number}: {text}")

            self.replicas.append(
                EngineClient(
                    own,
                    tokenizer,
                    metrics,
                    say,
                    replica=number,
                    numbers=numbers,
                    changed=self.changed,
                    environment=environment,
                )
            )
        by_prefix = config.cache.prefix_caching
        self._router = Router(
            len(self.replicas), block_size=config.block_size, kv_tokens=kv_tokens, by_prefix=by_prefix
        )

    @property
    def state(self) -> State:
        """Failed if all replicas are, closed or draining if any is, else the state closest to ready."""
        states = {replica.state for replica in self.replicas}
        if states == {"failed"}:
            return "failed"
        order: tuple[State, ...] = ("closed", "draining", "ready", "recovering", "starting")
        return next(state for state in order if state in states)

    @property
    def reason(self) -> str:
        """The state in words, including failed replicas."""
        failed = self._in_state("failed")
        found = f"{len(failed)} of {len(self.replicas)} replicas failed: {failed[0].reason}" if failed else ""
        if self.state == "failed":
            return found
        others = self._in_state(self.state)
        rest = others[0].reason
        if self.state == "ready" and len(others) < len(self.replicas):
            rest = f"{len(others)} of {len(self.replicas)} accept requests"
        return "; ".join(text for text in (found, rest) if text)

    @property
    def error(self) -> Failed | None:
        """The first engine's failure, if all have failed."""
        return self.replicas[0].error if self.state == "failed" else None

    @property
    def num_waiting(self) -> int:
        """Requests without a token yet."""
        return sum(replica.num_waiting for replica in self.replicas)

    @property
    def num_unfinished(self) -> int:
        """The number of unfinished requests on all replicas."""
        return sum(replica.num_unfinished for replica in self.replicas)

    async def start(self) -> None:
        """Start the engines' processes; `state` shows their progress."""
        for replica in self.replicas:
            await replica.start()

    def submit(self, call: Call, prompt: Sequence[int], params: Sequence[SamplingParams]) -> list[int]:
        """Send a prompt to one of the engines, like `EngineClient.submit`.

        Raises:
            EngineError: none takes requests.
        """
        return self._choose(prompt, call.cache_salt).submit(call, prompt, params)

    def resume(self, call: Call, number: int, text: OutputText, prompt: Sequence[int], params: SamplingParams) -> None:
        """Continue an earlier output on one of the engines, like `EngineClient.resume`.

        Raises:
            EngineError: none takes requests.
        """
        self._choose(prompt, call.cache_salt).resume(call, number, text, prompt, params)

    def _choose(self, prompt: Sequence[int], cache_salt: str) -> EngineClient:
        taking = [each.state for each in self.replicas if each.state in TAKES_REQUESTS]
        best = "ready" if "ready" in taking else "recovering"
        loads = {number: each.outstanding_tokens for number, each in enumerate(self.replicas) if each.state == best}
        if not loads:
            raise EngineError(self.reason)
        return self.replicas[self._router.choose(prompt, loads, cache_salt)]

    def abort(self, numbers: Sequence[int]) -> None:
        """Abort these requests, unless they are finished, on any engine."""
        for replica in self.replicas:
            replica.abort(numbers)

    def drain(self) -> None:
        """Accept no more requests; running ones continue."""
        for replica in self.replicas:
            replica.drain()

    async def close(self) -> None:
        """Shut down the engines and their ranks, by force after a timeout."""
        await asyncio.gather(*(replica.close() for replica in self.replicas))

    def _in_state(self, state: State) -> list[EngineClient]:
        return [replica for replica in self.replicas if replica.state == state]


Engine = EngineClient | ReplicaSet
