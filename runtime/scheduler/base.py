"""What every policy shares: the queues, admission, KV blocks, preemption. A policy is one method, `fill`."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from mypy_extensions import mypyc_attr

from ...conf.policies import SchedulerConfig
from ..core.block_pool import BlockPool
from ..core.messages import Span
from ..core.micro_batch import Chunk, MicroBatch
from ..core.request import Request
from ..core.run_record import Blocked, MicroBatchRecord
from .order import ORDERS


@dataclass(frozen=True)
class Limits:
    """`batch` (B): most requests in a micro-batch; `depth`: micro-batches in flight; `tile`: rows a matmul pads to;
    `stages` of the
    pipeline."""

    batch: int
    depth: int
    tile: int = 1
    stages: int = 1
    least_depth: int | None = None  # where the policy may choose: null is `depth`

    @property
    def running(self) -> int:
        """Most requests that hold KV at once."""
        return self.batch * self.depth


@mypyc_attr(allow_interpreted_subclasses=True)
class Scheduler:
    """Decides what the next micro-batch holds. Pure Python, deterministic, asks no clock.

    A request waits, is admitted (its prompt's blocks are set aside), is taken as chunks until it is prefilled, then
    becomes ready for a decode each time its token is back. What `fill` takes is dispatched. Requests are admitted in
    the order that `config.order` names and prefilled as admitted; decodes go in the order in which they became ready.
    """

    def __init__(self, config: SchedulerConfig, limits: Limits, pool: BlockPool) -> None:
        self.limits = limits
        self.pool = pool
        self.running: dict[int, Request] = {}  # admitted and not finished
        self.prefilling: list[Request] = []  # of the running: prompt not wholly dispatched, first come first
        self.ready: list[Request] = []  # of the running: a decode may be dispatched, first ready first
        self.dropped: list[int] = []  # preempted or finished since the last micro-batch: ranks forget them
        self.backlog = 0  # prompt tokens that are still to be dispatched, of waiting and of prefilling requests
        self.notes: list[str] = []  # what the policy chose by itself and why, a line each; the coordinator takes them
        self._order = ORDERS[config.order]()
        self._waiting: list[tuple[float, int, Request]] = []  # heap by the order's key, then by id
        self._num_waiting = 0
        self._turn = 0  # micro-batches filled
        self.short_of_kv = False

    def fill(self, batch: MicroBatch) -> None:
        """The policy: take what the next micro-batch shall hold."""
        raise NotImplementedError

    def reserved_tokens(self, request: Request) -> int:
        """Tokens whose KV blocks are set aside at admission."""
        return request.prefill_target

    def predict(self, micro_batch: MicroBatchRecord) -> list[float] | None:
        """Seconds that each stage will take for a micro-batch, where the policy foresees them."""
        return None

    def observe(self, micro_batch: MicroBatchRecord, spans: Sequence[Span]) -> None:
        """Stages, one or several, have computed a micro-batch."""

    @property
    def stage_times(self) -> list[list[float]] | None:
        """What the policy learned of the stages' times: weights of `features.FEATURES` by stage."""
        return None

    # What the coordinator calls.

    @property
    def depth(self) -> int:
        """Micro-batches in flight at once, at most `limits.depth`."""
        return self.limits.depth

    @property
    def slots(self) -> int:
        """Most requests that hold KV at once: B for each micro-batch in flight."""
        return self.limits.batch * self.depth

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    @property
    def has_work(self) -> bool:
        return bool(self.running or self._num_waiting)

    def add(self, request: Request) -> None:
        if request.order_key is None:
            request.order_key = self._order.key(request)
        heapq.heappush(self._waiting, (request.order_key, request.id, request))
        self._num_waiting += 1
        self.backlog += request.remaining_prefill

    def next_batch(self) -> MicroBatch | None:
        """The next micro-batch, its requests marked as dispatched; None if nothing is admissible (see `blocked`)."""
        self.short_of_kv = False
        batch = MicroBatch()
        self.fill(batch)
        self._turn += bool(batch)
        return batch or None

    @property
    def blocked(self) -> Blocked:
        """Why the last `next_batch` gave None."""
        if self.short_of_kv:
            return "kv_full"
        return "in_flight" if self.has_work else "no_request"

    def completed(self, batch: MicroBatch) -> None:
        """The micro-batch has left the last stage. Sampled tokens are given by `resume` or `finish` afterwards."""
        for chunk in batch.chunks:
            chunk.request.num_completed += chunk.length
            self._landed(chunk.request)
        for request in batch.decodes:
            request.num_completed += 1
            if request.finish_reason is not None:
                self._landed(request)

    def resume(self, requests: Sequence[Request]) -> None:
        """The requests' sampled tokens are appended and they go on: they may decode."""
        self.ready += requests

    def finish(self, request: Request, reason: str) -> None:
        """The request ends, whatever state it is in; its blocks are freed once nothing of it is in flight."""
        if request.finish_reason is not None:
            return
        request.finish_reason = reason
        self.backlog -= request.remaining_prefill
        if request.id not in self.running:
            self._num_waiting -= 1  # its heap entry is skipped when it comes up
            return
        self._unready(request)
        if request.remaining_prefill:
            self.prefilling.remove(request)
        if not request.in_flight:
            self._leave(request)

    # What policies call.

    def next_waiting(self) -> Request | None:
        """The request that would be admitted next."""
        while self._waiting and self._waiting[0][-1].is_finished:
            heapq.heappop(self._waiting)
        return self._waiting[0][-1] if self._waiting else None

    def admit(self) -> Request | None:
        """Admit the next waiting request if it has a slot and its blocks fit, with one block left for each running."""
        request = self.next_waiting()
        if request is None or len(self.running) >= self.slots:
            return None
        tokens = self.reserved_tokens(request)
        if self.pool.blocks_for(tokens) + len(self.running) > self.pool.num_free:
            self.short_of_kv = True
            return None
        heapq.heappop(self._waiting)
        self._num_waiting -= 1
        self._order.admitted(request)
        self.pool.grow(request.blocks, tokens)
        self.running[request.id] = request
        self.prefilling.append(request)
        return request

    def next_prompt(self) -> Request | None:
        """The prompt whose chunk is next: a partial one first, else a new one, admitted."""
        return self.prefilling[0] if self.prefilling else self.admit()

    def take_chunk(self, batch: MicroBatch, request: Request, length: int) -> None:
        """Dispatch the next `length` tokens of a prefill."""
        assert 1 <= length <= request.remaining_prefill, (length, request)
        batch.chunks.append(Chunk(request, request.num_dispatched, length))
        request.num_dispatched += length
        self.backlog -= length
        if not request.remaining_prefill:
            self.prefilling.remove(request)

    @property
    def decode_share(self) -> int:
        """This micro-batch's share of the decodes, ready and in flight, if all `depth` had equally many; the remainder
        is dealt round robin."""
        each, rest = divmod(len(self.running) - len(self.prefilling), depth := self.depth)
        return each + (self._turn % depth < rest)

    def take_decodes(self, batch: MicroBatch, most: int) -> None:
        """Dispatch up to `most` ready decodes, those first that have been ready the longest."""
        ready, pool = self.ready, self.pool
        queue = ready if most >= len(ready) else ready[: max(0, most)]
        if len(queue) > pool.num_free:  # one may preempt another, or has to be passed over
            self._take_decodes_sparing(batch, most)
            return
        size = pool.block_size
        for request in queue:
            request.num_dispatched += 1
            tokens = request.num_tokens
            if tokens > len(request.blocks) * size:
                pool.grow(request.blocks, tokens)
        self.ready = ready[len(queue) :]
        batch.decodes += queue

    def _take_decodes_sparing(self, batch: MicroBatch, most: int) -> None:
        """`take_decodes` where there may be fewer free blocks than decodes."""
        for request in self.ready.copy():
            if len(batch.decodes) >= most:
                break
            if request.num_dispatched and self._grow(request):  # not preempted meanwhile
                self.take_decode(batch, request)

    def take_prompts(self, batch: MicroBatch, budget: int) -> None:
        """Dispatch up to `budget` prompt tokens: partial prompts first, then new ones; B requests at most."""
        while budget > 0 and len(batch.chunks) + len(batch.decodes) < self.limits.batch:
            prompt = self.next_prompt()
            if prompt is None:
                return
            length = min(budget, prompt.remaining_prefill)
            self.take_chunk(batch, prompt, length)
            budget -= length

    def take_decode(self, batch: MicroBatch, request: Request) -> None:
        """Dispatch the decode of a ready request whose cache has room for it."""
        self._unready(request)
        request.num_dispatched += 1
        batch.decodes.append(request)

    def _grow(self, request: Request) -> bool:
        """Room in the cache for all of the request's tokens, if need be at the cost of newer ones."""
        while not self.pool.grow(request.blocks, request.num_tokens):
            victim = max((r for r in self.running.values() if not r.in_flight), key=lambda r: r.id, default=request)
            if victim.id <= request.id:
                self.short_of_kv = True
                return False
            self._preempt(victim)
        return True

    def _preempt(self, request: Request) -> None:
        """Take the request's cache; it keeps its tokens and enters again as a prefill of all of them."""
        if request.remaining_prefill:
            self.prefilling.remove(request)
        self._unready(request)
        self._leave(request)
        self.backlog -= request.remaining_prefill
        request.num_dispatched = request.num_completed = request.num_blocks_sent = 0
        request.prefill_target = request.num_tokens
        request.preemptions += 1
        self.add(request)

    def _unready(self, request: Request) -> None:
        """It may not decode any more, if it did."""
        for place, other in enumerate(self.ready):
            if other is request:
                del self.ready[place]
                return

    def _landed(self, request: Request) -> None:
        if request.is_finished and not request.in_flight:
            self._leave(request)

    def _leave(self, request: Request) -> None:
        del self.running[request.id]
        self.pool.release(request.blocks)
        if request.num_blocks_sent:
            self.dropped.append(request.id)
