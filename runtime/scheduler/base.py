"""What every policy shares: queues, admission, KV blocks, preemption, drafts. A policy is one method, `fill`."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from mypy_extensions import mypyc_attr

from ...conf.policies import Depth, SchedulerConfig
from ..core.block_pool import NOTHING_CACHED, BlockPool, CachedPrefix
from ..core.messages import Span
from ..core.micro_batch import Chunk, MicroBatch
from ..core.request import Request
from ..core.run_record import Blocked, MicroBatchRecord
from .learned.drafts import Drafts
from .waiting import make_queue


@dataclass(frozen=True)
class Limits:
    """Bounds that the plan sets for a policy.

    `batch` is the most requests in a micro-batch (B of the paper), `depth` the micro-batches in flight, `tile` the rows
    that a matrix product pads to, `stages` the stages of the pipeline. With `looks_ahead` one micro-batch more is in
    flight: requests go on in it before their newest token is seen.
    """

    batch: int
    depth: Depth
    tile: int = 1
    stages: int = 1
    looks_ahead: bool = False

    @property
    def running(self) -> int:
        """Most requests that hold KV at once."""
        return self.batch * self.depth.most


@mypyc_attr(allow_interpreted_subclasses=True)
class Scheduler:
    """Decides what the next micro-batch holds. It is pure Python, deterministic, and reads no clock.

    A request waits until it is admitted, which sets the blocks of its prompt aside. It is then taken as chunks until it
    is prefilled. After that it is ready for a decode each time its token has come back. What `fill` takes is
    dispatched. Requests are admitted in the order that `config.order` names. They are prefilled in the order of
    admission, unless that order lets a more urgent one overtake. Decodes go in the order in which they became ready.

    With `looks_ahead` a request is ready as soon as the micro-batch is dispatched that samples its token, unless that
    token ends it or changes how the next is sampled. It is in flight then, so it is not preempted.

    A request whose prompt another pipeline has prefilled comes with its tokens dispatched. It is `incoming` until
    `admit_incoming` sets its blocks aside. Its KV is then in flight, until `received` makes it ready for a decode.
    """

    cuts_prompts: ClassVar[bool] = True  # else each prompt enters whole, and blocks are set aside for all of it

    def __init__(self, config: SchedulerConfig, limits: Limits, pool: BlockPool) -> None:
        self.limits = limits
        self.tile = limits.tile
        self.pool = pool
        self.running: dict[int, Request] = {}  # admitted and not finished, by id
        self.prefilling: list[Request] = []  # of the running, those with prompt tokens to dispatch, first come first
        self.ready: list[Request] = []  # of the running, those that may decode, first ready first
        self.dropped: list[int] = []  # ids preempted or finished since the last micro-batch: ranks forget them
        self.backlog = 0  # prompt tokens to dispatch, of all requests that are waiting or running
        self.drafts = Drafts(config.drafts, limits.stages) if config.drafts else None
        self.looks_ahead = limits.looks_ahead and self.drafts is None  # drafts are guessed from the newest token
        self.notes: list[str] = []  # what the policy chose by itself and why, a line each; the coordinator takes them
        self.waiting = make_queue(config.order, config.max_prefill_share)
        self.by_priority = config.order == "priority"
        self.yielding: dict[int, Request] = {}  # of the running, those that are preempted once nothing is in flight
        self.incoming: deque[Request] = deque()  # not admitted; their KV lies on another pipeline
        self.num_receiving = 0  # of the running, those whose KV is in flight from another pipeline
        self._incoming_fit = True
        self.num_waiting = 0  # requests that have not been admitted
        self._turn = 0  # micro-batches filled
        self.short_of_kv = False

    def fill(self, batch: MicroBatch) -> None:
        """Take what the next micro-batch shall hold. This is the policy; each has its own."""
        raise NotImplementedError  # abc would not do: compiled subclasses share the cache of its isinstance

    def prepare(self) -> None:
        """Take over what has been learned since the last micro-batch, before `fill`."""

    def filled(self, batch: MicroBatch) -> None:
        """Take note of what `fill` has taken."""

    def reserved_tokens(self, request: Request) -> int:
        """Return the tokens whose KV blocks are set aside at admission."""
        return request.prefill_target

    def draft_room(self, batch: MicroBatch) -> int:
        """Return how many draft tokens the micro-batch that `fill` has made may take: up to the tile (paper 4.4).

        Beside a chunk they use what the tile would pad. Without one they may open another tile.
        """
        return -batch.num_tokens % self.tile if batch.chunks else self.tile - batch.num_tokens % self.tile

    def predict(self, micro_batch: MicroBatchRecord) -> list[float] | None:
        """Return the seconds that each stage will take for a micro-batch, None if the policy predicts none."""
        return None

    def observe(self, micro_batch: MicroBatchRecord, spans: Sequence[Span]) -> None:
        """Learn from the spans of one or several stages that have computed a micro-batch."""

    @property
    def stage_weights(self) -> list[list[float]] | None:
        """Weights of `Features` that the policy has learned, in seconds, [stages, features]; None if it learns none."""
        return None

    # What the coordinator calls.

    @property
    def depth(self) -> int:
        """Micro-batches in flight at once, within `limits.depth`."""
        return self.limits.depth.most

    @property
    def slots(self) -> int:
        """Most requests that hold KV at once: B for each micro-batch in flight."""
        return self.limits.batch * self.depth

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.running or self.num_waiting)

    def add(self, request: Request) -> None:
        """Put a new or preempted request into the queue, or one whose KV comes from another pipeline."""
        self.num_waiting += 1
        if request.num_dispatched:
            self.incoming.append(request)
            return
        if self.pool.cache is not None:
            request.hash_blocks(request.prefill_target, self.pool.block_size)
        self.waiting.push(request)
        self.backlog += request.remaining_prefill

    def next_batch(self) -> MicroBatch | None:
        """Return the next micro-batch, its tokens counted as dispatched; None if nothing is admissible."""
        self.short_of_kv = not self._incoming_fit
        batch = MicroBatch()
        if self.by_priority:
            self.make_room()
        self.prepare()
        self.fill(batch)
        if self.pool.slides and not batch:
            self._fill_stuck(batch)
        self.filled(batch)
        if self.drafts is not None and batch.decodes and (room := self.draft_room(batch)) > 0:
            self.drafts.add(batch, room, self.pool, len(self.running))
        if self.pool.cache is not None:
            for chunk in batch.chunks:
                self._cache_blocks(chunk.request, chunk.request.num_dispatched)
        if self.pool.slides:
            self._slide(batch)
        if self.looks_ahead:
            goes_on = [r for r in batch.sampled if r.num_dispatched + 1 < r.max_len]
            self.ready += [r for r in goes_on if not r.params.depends_on_past]
        self._turn += bool(batch)
        return batch or None

    def _fill_stuck(self, batch: MicroBatch) -> None:
        """Preempt the newest requests until the others can go on.

        Shared blocks that a prompt leaves behind its window are not free for what it has ahead. So all may lack some.
        """
        running = self.running
        while not batch and self.short_of_kv and len(running) > 1 and not any(r.in_flight for r in running.values()):
            self._preempt(max(running.values(), key=self._urgency))
            self.fill(batch)

    def _slide(self, batch: MicroBatch) -> None:
        """Free blocks behind windows, and give prompts the blocks ahead that they are promised instead."""
        for chunk in batch.chunks:
            self.pool.slide(chunk.request)
            self.pool.reserve(chunk.request, self.reserved_tokens(chunk.request))
        for request in batch.decodes:
            self.pool.slide(request)

    @property
    def blocked(self) -> Blocked:
        """Why the last `next_batch` returned None."""
        if self.num_receiving and self.num_receiving == len(self.running):
            return "kv_transfer"
        if self.short_of_kv:
            return "kv_full"
        return "in_flight" if self.has_work else "no_request"

    def completed(self, batch: MicroBatch) -> None:
        """Count a micro-batch that has left the last stage; `resume` or `finish` follows for its requests."""
        for chunk in batch.chunks:
            chunk.request.num_completed += chunk.length
            if chunk.request.is_finished and not chunk.request.in_flight:
                self._leave(chunk.request)
        for request in batch.decodes:
            request.num_completed += 1
            if request.is_finished and not request.in_flight:
                self._leave(request)

    def accepted(self, request: Request, count: int) -> None:
        """Count the `count` draft tokens of a decode that were right: their KV is computed."""
        request.num_dispatched += count
        request.num_completed += count
        if self.pool.slides:
            self.pool.slide(request)

    def resume(self, requests: Sequence[Request]) -> None:
        """Make requests ready for a decode: their sampled tokens are appended, and they go on.

        With `looks_ahead` most of them have been ready since their micro-batch was dispatched.
        """
        self.ready += [r for r in requests if r.params.depends_on_past] if self.looks_ahead else requests

    def admit_incoming(self) -> list[Request]:
        """Admit requests whose KV comes from another pipeline, and return them.

        They come first come first served, behind those that were preempted here. Each has a slot and blocks for its
        tokens, with one block left for each running.
        """
        admitted: list[Request] = []
        self._incoming_fit = True
        while self.incoming and self.num_waiting == len(self.incoming) and len(self.running) < self.slots:
            request = self.incoming[0]
            spare = len(self.running) * self.pool.num_groups
            if self.pool.blocks_for(request.num_tokens) + spare > self.pool.num_free:
                self._incoming_fit = False
                break
            self.incoming.popleft()
            self.num_waiting -= 1
            self.pool.reserve(request, request.num_tokens)
            self.running[request.id] = request
            self.num_receiving += 1
            admitted.append(request)
        return admitted

    def received(self, request: Request) -> None:
        """Make a request ready for a decode: the KV of its prompt has come from another pipeline."""
        request.num_completed = request.num_dispatched
        self.num_receiving -= 1
        self.ready.append(request)

    def finish(self, request: Request, reason: str) -> None:
        """End a request in any state. Its blocks are freed once none of its tokens is in flight."""
        if request.finish_reason is not None:
            return
        request.finish_reason = reason
        if self.drafts is not None:
            self.drafts.finished(request)
        if reason == "error" and self.pool.cache is not None:
            self.pool.forget(request)
        self.backlog -= request.remaining_prefill
        if request.id not in self.running:
            self.num_waiting -= 1  # its heap entry is skipped when it comes up
            return
        self._withdraw(request)
        if not request.in_flight:
            self._leave(request)

    def restart(self) -> tuple[int, int]:
        """Forget what the ranks held, since they hold it no more.

        Every request that was admitted waits again for a prefill of all its tokens. Nothing is in flight from now on.

        Returns:
            The number of unfinished requests among them, and of their tokens that had been computed.
        """
        admitted, tokens = list(self.running.values()), 0
        self.running.clear()
        self.yielding.clear()
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

    # What policies call.

    def admit(self) -> Request | None:
        """Admit the next waiting request if it has a slot and its blocks fit, with one for each table of those running.

        Blocks of the prefix cache that it begins with are shared, and their tokens count as computed, unless the
        log-probabilities of its prompt are wanted.
        """
        request = self.waiting.head()
        if request is None or len(self.running) >= self.slots:
            return None
        pool, cache = self.pool, self.pool.cache
        need, prefix = self._needs(request)
        if need + len(self.running) * pool.num_groups > pool.num_free:
            self.short_of_kv = True
            return None
        self.waiting.pop()
        self.num_waiting -= 1
        if cache is not None:
            self._begin_with(request, prefix)
        pool.reserve(request, self.reserved_tokens(request))
        self.running[request.id] = request
        self.prefilling.append(request)
        return request

    def _needs(self, request: Request) -> tuple[int, CachedPrefix]:
        """Return the free blocks that an admission takes, and the prefix in the cache that it begins with."""
        pool, prefix = self.pool, NOTHING_CACHED
        if pool.cache is not None and request.block_hashes and request.prompt_logprobs is None:
            # The last token of a prompt is computed in any case, since the next one is sampled from it.
            prefix = pool.find(request.block_hashes, (request.prefill_target - 1) // pool.block_size)
        return pool.need(self.reserved_tokens(request), prefix), prefix

    def make_room(self) -> None:
        """Preempt the least urgent requests, as many as make room for a more urgent one that waits, if they can.

        Those with tokens in flight take part in no further micro-batch, and are preempted once nothing of them is.
        """
        for request in list(self.yielding.values()):
            if request.id in self.running and not request.in_flight:
                self._preempt(request)
        head, pool = self.waiting.head(), self.pool
        if head is None:
            return
        need, _ = self._needs(head)
        leaving = {r.id: r for r in self.running.values() if r.is_finished} | self.yielding
        running = len(self.running) - len(leaving)
        free = pool.num_free + sum(pool.num_of(r) for r in leaving.values())
        others = [r for r in self.running.values() if r.priority > head.priority and r.id not in leaving]
        others.sort(key=self._urgency)
        victims: list[Request] = []
        while running >= self.slots or need + running * pool.num_groups > free:
            if not others:
                return  # all of them are not enough
            victims.append(others.pop())
            running -= 1
            free += pool.num_of(victims[-1])
        for request in victims:
            if request.in_flight:
                self._withdraw(request)
                self.yielding[request.id] = request
            else:
                self._preempt(request)

    def _begin_with(self, request: Request, prefix: CachedPrefix) -> None:
        """Begin a request with blocks of the prefix cache."""
        cache, hit = self.pool.cache, prefix.num_blocks * self.pool.block_size
        assert cache is not None
        if hit:
            request.num_dispatched = request.num_completed = hit
            self.pool.take_over(request, prefix)
            request.num_blocks_hashed = prefix.num_blocks
            self.backlog -= hit
        if not request.preemptions and request.record.first_dispatched is None:
            request.record.cached_tokens = hit
            cache.queries += request.prompt_len
            cache.hits += hit

    def next_prompt(self) -> Request | None:
        """Return the prompt whose chunk is next: a partial one, else a new one, which is admitted.

        Under `order=relative_slack` a new one that is more urgent goes before, if it has a slot and its blocks fit.
        """
        if not self.prefilling:
            return self.admit()
        prompt = self.waiting.first_of(self.prefilling)
        return (self.admit() or prompt) if self.waiting.overtakes(prompt) else prompt

    def take_chunk(self, batch: MicroBatch, request: Request, length: int) -> None:
        """Dispatch the next `length` tokens of a prefill.

        Nothing is taken of a preempted request: a policy may pick a prompt, then take decodes, which may preempt it for
        room in the KV cache. Where layers have windows, fewer tokens are taken if blocks lack.
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
        """This micro-batch's share of all decodes, ready and in flight, dealt evenly over the depth.

        The remainder is dealt round robin.
        """
        num_decodes = len(self.running) - len(self.prefilling) - self.num_receiving - len(self.yielding)
        each, rest = divmod(num_decodes, depth := self.depth)
        return each + (self._turn % depth < rest)

    def take_decodes(self, batch: MicroBatch, most: int) -> None:
        """Dispatch up to `most` ready decodes, first those that have been ready the longest."""
        ready, pool = self.ready, self.pool
        queue = ready if most >= len(ready) else ready[: max(0, most)]
        if len(queue) * pool.num_groups > pool.num_free:  # one may preempt another, or has to be passed over
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
        self._unready(request)
        request.num_dispatched += 1
        batch.decodes.append(request)

    def _grow(self, request: Request) -> bool:
        """Make room in the cache for one more token, if need be by preempting newer requests. True if it fits."""
        while not self.pool.extend(request, request.num_dispatched + 1):
            victim = max((r for r in self.running.values() if not r.in_flight), key=self._urgency, default=request)
            if self._urgency(victim) <= self._urgency(request):
                self.short_of_kv = True
                return False
            self._preempt(victim)
        return True

    def _urgency(self, request: Request) -> tuple[int, int]:
        """Return what is greatest of the request that is preempted first: the newest, of the highest priority."""
        return request.priority if self.by_priority else 0, request.id

    def _preempt(self, request: Request) -> None:
        """Free the cache of a request, which keeps its tokens and waits again for a prefill of all of them."""
        self._withdraw(request)
        self._leave(request)
        request.preemptions += 1
        self._requeue(request)

    def _requeue(self, request: Request) -> None:
        """Put a request that holds no cache any more back into the queue, for a prefill of all its tokens."""
        self.backlog -= request.remaining_prefill
        request.num_dispatched = request.num_completed = request.num_blocks_sent = request.num_blocks_hashed = 0
        request.prefill_target = request.num_tokens
        self.add(request)

    def _withdraw(self, request: Request) -> None:
        """Take a running request out of `prefilling` and `ready`, so that no further micro-batch holds it."""
        if request.remaining_prefill and request.id not in self.yielding:
            self.prefilling.remove(request)
        self._unready(request)

    def _unready(self, request: Request) -> None:
        """Take a request out of `ready`, if it is there."""
        for place, other in enumerate(self.ready):
            if other is request:
                del self.ready[place]
                return

    def _leave(self, request: Request) -> None:
        del self.running[request.id]
        self.yielding.pop(request.id, None)
        if self.pool.cache is not None:
            if request.finish_reason != "error":
                request.hash_blocks(request.num_completed, self.pool.block_size)
                self._cache_blocks(request, request.num_completed)
            request.num_blocks_hashed = 0
        self.pool.release(self.pool.take_back(request))
        if request.num_blocks_sent:
            self.dropped.append(request.id)

    def _cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Offer the full blocks of a request's first `num_tokens` tokens, which are dispatched, to the prefix cache."""
        stop = min(num_tokens // self.pool.block_size, len(request.block_hashes))
        if stop > request.num_blocks_hashed:
            self.pool.store(request, stop)
            request.num_blocks_hashed = stop
