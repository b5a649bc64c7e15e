"""Base class of policies: waiting and running requests, and the next micro-batch. A policy implements `fill`."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from mypy_extensions import mypyc_attr

from ...conf.policies import SchedulerConfig
from ..core.block_pool import BlockPool
from ..core.messages import Span
from ..core.micro_batch import Chunk, MicroBatch
from ..core.request import Request
from ..core.run_record import Blocked, MicroBatchRecord
from .kv_receiver import KvReceiver
from .limits import Limits
from .preemption import Preemption
from .prefix_caching import PrefixCaching
from .speculative_decoding import SpeculativeDecoding
from .waiting import ORDERS


@mypyc_attr(allow_interpreted_subclasses=True)
class Scheduler:
    """Fills one micro-batch at a time from waiting and running requests. It is deterministic and reads no clock.

    A request waits until it is admitted, which reserves KV blocks for its prompt. It is then prefilled in chunks. After
    that it is ready to decode each time its sampled token has come back. Whatever `fill` takes is dispatched.
    `config.order` sets the admission order. Prompts are prefilled in admission order, unless `config.order` lets a more
    urgent one overtake. Decodes are taken in the order in which they became ready.

    With `looks_ahead` a request is ready as soon as the micro-batch that samples its token is dispatched, unless it
    reaches its maximum length or its sampling depends on past tokens. It is still in flight, so it is not preempted.

    A request prefilled by another pipeline (disaggregated prefill) arrives with its tokens already dispatched. It waits
    until `admit_incoming` reserves its blocks. Its KV is then in flight until `received` makes it ready to decode.
    """

    cuts_prompts: ClassVar[bool] = True  # chunked prefill; else prompts enter whole, with all blocks reserved

    def __init__(self, config: SchedulerConfig, limits: Limits, pool: BlockPool) -> None:
        looks_ahead = limits.looks_ahead and not config.drafts  # draft tokens are guessed from the newest token
        self.limits = replace(limits, looks_ahead=looks_ahead)
        self.pool = pool
        self.waiting = ORDERS[config.order]()
        self.num_waiting = 0  # requests that have not been admitted
        self.running: dict[int, Request] = {}  # admitted and not finished, by id
        self.prefilling: list[Request] = []  # running requests with prompt tokens left to dispatch, in admission order
        self.ready: list[Request] = []  # running requests that may decode, first ready first
        self.backlog = 0  # prompt tokens left to dispatch, over all waiting and running requests
        self.speculative_decoding = SpeculativeDecoding(config.drafts, limits.num_stages) if config.drafts else None
        self.short_of_kv = False  # whether the last micro-batch left out a request for lack of KV blocks
        self.dropped: list[int] = []  # ids preempted or finished since the last micro-batch: ranks forget them
        self.notes: list[str] = []  # automatic choices and their reasons, one line each, for the coordinator
        self._prefixes = PrefixCaching(pool)
        self._preemption = Preemption(config.order == "priority")
        self._receiver = KvReceiver()
        self._turn = 0  # micro-batches filled

    def fill(self, batch: MicroBatch) -> None:
        """Fill the next micro-batch. Each policy implements this method."""
        raise NotImplementedError  # not abc: compiled subclasses would share its isinstance cache

    def prepare(self) -> None:
        """Adopt what has been learned since the last micro-batch; called before `fill`."""

    def filled(self, batch: MicroBatch) -> None:
        """Record what `fill` has taken."""

    def reserved_tokens(self, request: Request) -> int:
        """Return the number of tokens whose KV blocks are reserved at admission."""
        return request.prefill_target

    def draft_room(self, batch: MicroBatch) -> int:
        """Return how many draft tokens may be added after `fill`: up to the tile (paper 4.4).

        With a chunk they use the rows that the tile would pad. Without one they may open another tile.
        """
        tile = self.limits.tile
        return -batch.num_tokens % tile if batch.chunks else tile - batch.num_tokens % tile

    def predict(self, micro_batch: MicroBatchRecord) -> list[float] | None:
        """Return the predicted seconds per stage for a micro-batch; None if the policy makes no predictions."""
        return None

    def observe(self, micro_batch: MicroBatchRecord, spans: Sequence[Span]) -> None:
        """Learn from the spans of one or several stages that have computed a micro-batch."""

    @property
    def stage_weights(self) -> list[list[float]] | None:
        """Weights of `Features` that the policy has learned, in seconds, [stages, features]; None if it learns none."""
        return None

    # Called by the coordinator.

    @property
    def depth(self) -> int:
        """Micro-batches in flight at once, within `limits.depth`."""
        return self.limits.depth.most

    @property
    def slots(self) -> int:
        """Maximum number of requests that hold KV at once: B per micro-batch in flight."""
        return self.limits.batch * self.depth

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.running or self.num_waiting)

    def add(self, request: Request) -> None:
        """Put a new or preempted request into the queue, or one whose KV comes from another pipeline."""
        self.num_waiting += 1
        if request.num_dispatched:
            self._receiver.queue.append(request)
            return
        self._prefixes.hash(request)
        self.waiting.push(request)
        self.backlog += request.remaining_prefill

    def next_batch(self) -> MicroBatch | None:
        """Return the next micro-batch, with its tokens counted as dispatched; None if nothing can be scheduled."""
        self.short_of_kv = self._receiver.is_short_of_kv
        batch = MicroBatch()
        if self._preemption.by_priority:
            self.make_room()
        self.prepare()
        self.fill(batch)
        if self.pool.slides and not batch:
            self._fill_stuck(batch)
        self.filled(batch)
        if self.speculative_decoding is not None and batch.decodes and (room := self.draft_room(batch)) > 0:
            self.speculative_decoding.add(batch, room, self.pool, len(self.running))
        self._prefixes.dispatched(batch.chunks)
        if self.pool.slides:
            self._slide(batch)
        if self.limits.looks_ahead:
            goes_on = [r for r in batch.sampled if r.num_dispatched + 1 < r.max_len]
            self.ready += [r for r in goes_on if not r.params.depends_on_past]
        self._turn += bool(batch)
        return batch or None

    def make_room(self) -> None:
        """Preempt less urgent requests if that makes room for the next waiting one (`order=priority`)."""
        for request in list(self._preemption.yielding.values()):
            if not request.in_flight:
                self._preempt(request)
        urgent = self.waiting.head()
        if urgent is None:
            return
        need = self.pool.need(self.reserved_tokens(urgent), self._prefixes.find(urgent))
        for request in self._preemption.victims(urgent, need, self.running, self.slots, self.pool):
            self._preempt(request)

    def _fill_stuck(self, batch: MicroBatch) -> None:
        """Preempt the newest requests until the others can continue.

        Shared blocks behind a prompt's sliding window are not freed for the tokens ahead. So all may run short.
        """
        running = self.running
        while not batch and self.short_of_kv and len(running) > 1 and not any(r.in_flight for r in running.values()):
            self._preempt(max(running.values(), key=self._preemption.urgency))
            self.fill(batch)

    def _slide(self, batch: MicroBatch) -> None:
        """Free blocks behind sliding windows, and reserve the blocks that prompts need ahead."""
        for chunk in batch.chunks:
            self.pool.slide(chunk.request)
            self.pool.reserve(chunk.request, self.reserved_tokens(chunk.request))
        for request in batch.decodes:
            self.pool.slide(request)

    @property
    def blocked(self) -> Blocked:
        """Why the last `next_batch` returned None."""
        if self._receiver.num_receiving and self._receiver.num_receiving == len(self.running):
            return "kv_transfer"
        if self.short_of_kv:
            return "kv_full"
        return "in_flight" if self.has_work else "no_request"

    def completed(self, batch: MicroBatch) -> None:
        """Record that a micro-batch has left the last stage; `resume` or `finish` follows for its requests."""
        for chunk in batch.chunks:
            chunk.request.num_completed += chunk.length
            if chunk.request.is_finished and not chunk.request.in_flight:
                self._leave(chunk.request)
        for request in batch.decodes:
            request.num_completed += 1
            if request.is_finished and not request.in_flight:
                self._leave(request)

    def accepted(self, request: Request, count: int) -> None:
        """Count a decode's `count` accepted draft tokens: their KV is computed."""
        request.num_dispatched += count
        request.num_completed += count
        if self.pool.slides:
            self.pool.slide(request)

    def resume(self, requests: Sequence[Request]) -> None:
        """Make requests ready to decode: their sampled tokens have been appended.

        With `looks_ahead` most of them have been ready since their micro-batch was dispatched.
        """
        self.ready += [r for r in requests if r.params.depends_on_past] if self.limits.looks_ahead else requests

    def admit_incoming(self) -> list[Request]:
        """Admit requests whose KV comes from another pipeline, after those preempted here, and return them."""
        none_preempted = self.num_waiting == len(self._receiver.queue)
        admitted = self._receiver.admit(self.running, self.slots if none_preempted else 0, self.pool)
        self.num_waiting -= len(admitted)
        return admitted

    def received(self, request: Request) -> None:
        """Make a request ready to decode: its prompt's KV has arrived from another pipeline."""
        self._receiver.received(request)
        self.ready.append(request)

    def finish(self, request: Request, reason: str) -> None:
        """Finish a request in any state. Its blocks are freed once none of its tokens is in flight."""
        if request.finish_reason is not None:
            return
        request.finish_reason = reason
        if self.speculative_decoding is not None:
            self.speculative_decoding.finished(request)
        if reason == "error":
            self._prefixes.forget(request)
        self.backlog -= request.remaining_prefill
        if request.id not in self.running:
            self.num_waiting -= 1  # its heap entry is skipped when it comes up
            return
        self._withdraw(request)
        if not request.in_flight:
            self._leave(request)

    def restart(self) -> tuple[int, int]:
        """Drop all KV state, since the ranks have lost it.

        Every admitted request is requeued for a prefill of all its tokens. Nothing is in flight afterwards.

        Returns:
            The number of requeued requests, and the number of their tokens that had been computed.
        """
        admitted, tokens = list(self.running.values()), 0
        self.running.clear()
        self._preemption.yielding.clear()
        self.prefilling.clear()
        self.ready.clear()
        self.dropped.clear()
        for request in admitted:
            self.pool.release(self.pool.take_back(request))
        self.pool.forget_content()
        unfinished = [request for request in admitted if not request.is_finished]
        for request in unfinished:
            tokens += request.num_completed
            self._requeue(request)
        return len(unfinished), tokens

    # Called by policies.

    def admit(self) -> Request | None:
        """Admit the next waiting request if a slot is free and its blocks fit; None if not.

        One spare block must be left per block table of each running request. Blocks of a cached prefix are shared, and
        their tokens count as computed, unless prompt log-probabilities are requested.
        """
        request = self.waiting.head()
        if request is None or len(self.running) >= self.slots:
            return None
        pool, prefix = self.pool, self._prefixes.find(request)
        need = pool.need(self.reserved_tokens(request), prefix)
        if need + len(self.running) * pool.num_groups > pool.num_free:
            self.short_of_kv = True
            return None
        self.waiting.pop()
        self.num_waiting -= 1
        self.backlog -= self._prefixes.begin(request, prefix)
        pool.reserve(request, self.reserved_tokens(request))
        self.running[request.id] = request
        self.prefilling.append(request)
        return request

    def next_prompt(self) -> Request | None:
        """Return the prompt to take the next chunk from: a partly dispatched one, else a newly admitted one.

        A waiting prompt that overtakes it in the queue's order goes first, if a slot is free and its blocks fit.
        """
        if not self.prefilling:
            return self.admit()
        prompt = self.waiting.first_of(self.prefilling)
        return (self.admit() or prompt) if self.waiting.overtakes(prompt) else prompt

    def take_chunk(self, batch: MicroBatch, request: Request, length: int) -> None:
        """Dispatch the next `length` tokens of a prefill.

        Does nothing for a preempted request: a policy may pick a prompt and then take decodes, which may preempt it to
        free KV cache. With sliding-window layers, fewer tokens are taken if blocks run short.
        """
        if request.id not in self.running:
            return
        if self.pool.slides:
            length = self.pool.cover(request, length, len(self.running) * self.pool.num_groups)
            if length == 0:
                self.short_of_kv = True
                return
        assert 1 <= length <= request.remaining_prefill, (length, request)
        batch.chunks.append(Chunk(request, request.num_dispatched, length))
        request.num_dispatched += length
        self.backlog -= length
        self.waiting.dispatched(request, length)
        if not request.remaining_prefill:
            self.prefilling.remove(request)

    @property
    def decode_share(self) -> int:
        """This micro-batch's share of all decodes, ready and in flight, distributed evenly over the depth.

        The remainder is distributed round robin.
        """
        others = len(self.prefilling) + self._receiver.num_receiving + len(self._preemption.yielding)
        each, rest = divmod(len(self.running) - others, depth := self.depth)
        return each + (self._turn % depth < rest)

    def take_decodes(self, batch: MicroBatch, most: int) -> None:
        """Dispatch up to `most` ready decodes, longest-ready first."""
        ready, pool = self.ready, self.pool
        queue = ready if most >= len(ready) else ready[: max(0, most)]
        if len(queue) * pool.num_groups > pool.num_free:  # one may preempt another, or be skipped
            for request in ready.copy():
                if len(batch.decodes) < most and request.num_dispatched and self._grow(request):  # else preempted
                    self.take_decode(batch, request)
            return
        size = pool.block_size
        for request in queue:
            request.num_dispatched += 1
            if request.num_dispatched > len(request.blocks) * size:
                pool.extend(request, request.num_dispatched)
        self.ready = ready[len(queue) :]
        batch.decodes += queue

    def take_prompts(self, batch: MicroBatch, budget: int) -> None:
        """Dispatch up to `budget` prompt tokens: partial prompts first, then new ones; B requests at most."""
        while budget > 0 and batch.num_requests < self.limits.batch and (prompt := self.next_prompt()):
            length = min(budget, prompt.remaining_prefill)
            self.take_chunk(batch, prompt, length)
            if prompt.remaining_prefill:
                return
            budget -= length

    def take_decode(self, batch: MicroBatch, request: Request) -> None:
        """Dispatch the decode of a ready request; its blocks have room for the token."""
        self.ready.remove(request)
        request.num_dispatched += 1
        batch.decodes.append(request)

    def _grow(self, request: Request) -> bool:
        """Make room in the KV cache for one more token, preempting less urgent requests. Return whether it fits."""
        while not self.pool.extend(request, request.num_dispatched + 1):
            victim = self._preemption.victim(request, self.running)
            if victim is None:
                self.short_of_kv = True
                return False
            self._preempt(victim)
        return True

    def _preempt(self, request: Request) -> None:
        """Preempt a request: free its KV cache, and requeue it for a prefill of all its tokens (recompute).

        With tokens in flight it is scheduled no further, and preempted once they are back.
        """
        self._withdraw(request)
        if request.in_flight:
            self._preemption.yielding[request.id] = request
            return
        self._leave(request)
        request.preemptions += 1
        self._requeue(request)

    def _requeue(self, request: Request) -> None:
        """Requeue a request whose KV cache has been freed, for a prefill of all its tokens."""
        self.backlog -= request.remaining_prefill
        request.num_dispatched = request.num_completed = request.num_blocks_sent = request.num_blocks_hashed = 0
        request.prefill_target = request.num_tokens
        self.add(request)

    def _withdraw(self, request: Request) -> None:
        """Take a running request out of `prefilling` and `ready`, so that it is scheduled no further."""
        if request.remaining_prefill and request.id not in self._preemption.yielding:
            self.prefilling.remove(request)
        if request in self.ready:
            self.ready.remove(request)

    def _leave(self, request: Request) -> None:
        del self.running[request.id]
        self._preemption.yielding.pop(request.id, None)
        self._prefixes.leave(request)
        self.pool.release(self.pool.take_back(request))
        if request.num_blocks_sent:
            self.dropped.append(request.id)
