"""The coordinator: fills the pipeline with the scheduler's micro-batches, and records why it could not dispatch.

It uses only the `Pipeline` protocol, so the same code drives a real cluster and a simulated one.
"""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..core.columns import IntColumn, append_to_each
from ..core.messages import (
    UNSEEN_TOKEN,
    DecodesMessage,
    MicroBatchMessage,
    MicroBatchResult,
    NewRequest,
    Sampled,
    SegmentMessage,
    Span,
    TokenLogprobs,
)
from ..core.micro_batch import Chunk, MicroBatch
from ..core.request import Request
from ..core.run_record import DecodesRecord, FaultRecord, MicroBatchRecord, RunRecord, SegmentRecord, Wait
from ..core.stage_floor import StageFloor
from ..pipeline.protocol import Pipeline, PipelineError, PipelineFault
from ..scheduler.base import Scheduler


class TokenEvent:
    """A request received a token, ended, or both (`token` is None if it ended without one).

    A micro-batch that verified draft tokens yields several events per request. The event with `is_last` ends it.
    """

    __slots__ = ("is_last", "logprobs", "request", "time", "token")

    def __init__(
        self, request: Request, token: int | None, logprobs: TokenLogprobs | None, time: float, is_last: bool
    ) -> None:
        self.request = request
        self.token = token
        self.logprobs = logprobs
        self.time = time
        self.is_last = is_last


# Called with each new token, before the next dispatch. Returns a finish reason that depends on the text (a stop
# string), or None.
StopCheck = Callable[[Request, int, TokenLogprobs | None], str | None]


class Coordinator:
    """Drives one pipeline with one scheduler. Single-threaded: call `step` until `has_work` is false.

    With `ends_only`, events are emitted only for requests that end. Token times are recorded either way.

    The coordinator owns `epoch`, which counts restarts of the pipeline from 0. Every message and every result carries
    it, and results of another epoch are dropped. Nothing else sets it.

    A pipeline fault ends the epoch. Micro-batches in flight are dropped. Every admitted request returns to the queue,
    to prefill its prompt and the tokens received so far, as after a preemption. Nothing is dispatched until the
    pipeline is restored. No token is lost or sent twice, since accepted tokens are part of that prefill.

    If the pipeline is restored with fewer stages, `on_fewer_stages` makes a scheduler for them, which takes over the
    requests.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        scheduler: Scheduler,
        *,
        on_fewer_stages: Callable[[int], Scheduler] | None = None,
        stop_check: StopCheck | None = None,
        first_micro_batch: int = 0,
        epoch: int = 0,
        ends_only: bool = False,
        floors: list[StageFloor] | None = None,
    ) -> None:
        assert scheduler.limits.depth.most <= pipeline.depth, (scheduler.limits.depth, pipeline.depth)
        self.pipeline = pipeline
        self.scheduler = scheduler
        self.clock = pipeline.clock
        self.epoch = epoch
        self._num_stages = pipeline.num_stages
        self._on_fewer_stages = on_fewer_stages
        self._stop_check = stop_check
        self._ends_only = ends_only
        self._floors = floors or []
        self.next_micro_batch = first_micro_batch
        self._in_flight: dict[int, tuple[MicroBatch, MicroBatchRecord]] = {}
        self.begin_record()

    def begin_record(self) -> None:
        """Begin a new record, while nothing is in flight. Scheduler state and prefix cache are kept."""
        assert not self._in_flight
        pipeline, limits = self.pipeline, self.scheduler.limits
        self.record = RunRecord(
            pipeline.num_stages,
            pipeline.num_blocks,
            batch=limits.batch,
            depth=limits.depth.most,
            floors=self._floors,
        )
        self._waits: list[Wait] = []  # since the last dispatch
        self._blocked_since: float | None = self.clock.now()
        self._blocked_by = self.scheduler.blocked

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs, or a micro-batch is in flight."""
        return self.scheduler.has_work or bool(self._in_flight)

    @property
    def is_recovering(self) -> bool:
        """Whether a fault is not repaired yet."""
        faults = self.record.faults
        return bool(faults) and faults[-1].up is None

    def check_progress(self) -> None:
        """Check that the run is not stalled. Call this after a dispatch, when no more requests will arrive.

        Raises:
            PipelineError: the policy dispatches none of the unfinished requests, with nothing in flight.
        """
        if self.scheduler.has_work and not self._in_flight and not self.is_recovering:
            unfinished = self.scheduler.num_waiting + len(self.scheduler.running)
            raise PipelineError(f"scheduler stalled: {unfinished} unfinished requests, none in flight")

    def add(self, request: Request, ready: float | None = None) -> None:
        """Accept a request that could start at `ready` at the earliest; None: at its arrival.

        It must fit into an empty cache. Requests must be added in order of their ids, except those whose KV comes from
        another pipeline and those that were not ready when they arrived.
        """
        assert self.scheduler.pool.blocks_for(request.max_len) <= self.scheduler.pool.num_blocks, request
        self._unblocked(request.arrival if ready is None else ready)
        self.record.requests.append(request.record)
        self.scheduler.add(request)

    def abort(self, request: Request) -> None:
        """End a request now. Tokens from its micro-batches in flight are dropped when they arrive."""
        if not request.is_finished:
            self._finish(request, "abort", self.clock.now())

    def step(self, deadline: float, arrive: Callable[[], None] = lambda: None) -> list[TokenEvent]:
        """Dispatch admissible work, wait for results until `deadline`, dispatch again, and return the new tokens.

        `arrive` is called before each dispatch, to add newly arrived requests.
        """
        arrive()
        self.dispatch()
        events = self.collect(deadline)
        arrive()
        self.dispatch()
        return events

    def collect(self, deadline: float) -> list[TokenEvent]:
        """Wait for results until `deadline` and return the new tokens, without dispatching."""
        events: list[TokenEvent] = []
        try:
            results = self.pipeline.wait(deadline)
        except PipelineFault as fault:
            self._recover(fault)
            return events
        for result in results:
            self._handle(result, events)
        if not results and self.pipeline.num_stages != self._num_stages and not self.is_recovering:
            self._go_on_with_fewer_stages()
        return events

    def _go_on_with_fewer_stages(self) -> None:
        """Move all requests, which are waiting, to a new scheduler for the remaining stages."""
        self._num_stages = self.pipeline.num_stages
        self._floors = self.record.floors = []  # the old ones no longer match the layer split
        assert self._on_fewer_stages is not None
        waiting = sorted(self.scheduler.waiting, key=lambda request: request.id)
        before = self.scheduler.pool.cache
        self.scheduler = self._on_fewer_stages(self._num_stages)
        now = self.scheduler.pool.cache
        if before is not None and now is not None:
            now.queries, now.hits = before.queries, before.hits
        for request in waiting:
            self.scheduler.add(request)

    def _recover(self, fault: PipelineFault) -> None:
        """End the epoch: drop micro-batches in flight, requeue requests, restart the pipeline.

        Raises:
            PipelineError: it cannot be repaired.
        """
        now = self.clock.now()
        since = fault.since
        faults = self.record.faults
        if self.is_recovering:  # the repair has failed
            faults[-1].up = since = now
        if self._blocked_since is None or self._blocked_since < since:
            self._unblocked(since)
            self._blocked_since = since
        self._blocked_by = "recovery"
        self.epoch += 1
        self._in_flight.clear()
        requests, tokens = self.scheduler.restart()
        faults.append(FaultRecord(self.epoch, fault.reason, str(fault), since, now, requests=requests, tokens=tokens))
        self.pipeline.restart(faults[-1])

    def dispatch(self) -> None:
        """Fill the pipeline up to its depth, plus one micro-batch if the scheduler looks ahead."""
        if self.is_recovering:
            self._block("recovery")
            return
        while len(self._in_flight) < self.scheduler.depth + self.scheduler.limits.looks_ahead:
            batch = self.scheduler.next_batch()
            if batch is None:
                self._block(self.scheduler.blocked)
                return
            self._submit(batch)
        self._block("depth_full")

    def _submit(self, batch: MicroBatch) -> None:
        scheduler = self.scheduler
        now = self.clock.now()
        self._unblocked(now)
        number = self.next_micro_batch
        new: list[NewRequest] = []
        chunks: list[SegmentMessage] = []
        recorded_chunks: list[SegmentRecord] = []
        sampled_rows = len(batch.decodes) + batch.num_draft_tokens
        for chunk in batch.chunks:
            chunks.append(_segment(chunk, now, new))
            recorded_chunks.append(SegmentRecord(chunk.request.id, chunk.start, chunk.length))
            sampled_rows += chunk.length if chunks[-1].targets else chunk.ends_prefill
        decodes = _decodes(batch)
        micro_batch = MicroBatchMessage(self.epoch, number, chunks, decodes, new, scheduler.dropped)
        scheduler.dropped = []
        record = MicroBatchRecord(
            number,
            now,
            recorded_chunks,
            DecodesRecord(decodes.requests, decodes.starts),
            self._waits,
            kv_blocks_used=scheduler.pool.num_used,
            num_waiting=scheduler.num_waiting,
            num_running=len(scheduler.running),
            sampled_rows=sampled_rows,
            drafts=decodes.drafts,
        )
        record.predicted = scheduler.predict(record)
        if scheduler.notes:
            self.record.notes += scheduler.notes
            scheduler.notes = []
        self._waits = []
        self.next_micro_batch += 1
        self._in_flight[number] = (batch, record)
        self.record.micro_batches.append(record)
        self.pipeline.submit(micro_batch)

    def _handle(self, result: MicroBatchResult, events: list[TokenEvent]) -> None:
        if result.epoch != self.epoch:
            return
        number, spans, sampled = result.micro_batch, result.spans, result.sampled
        self.record.spans += spans
        if sampled is None:
            if number in self._in_flight:
                self._observe(self._in_flight[number][1], spans)
            return
        batch, record = self._in_flight.pop(number)
        now = self.clock.now()
        record.completed = now
        self._observe(record, spans)
        self.record.stage_weights = self.scheduler.stage_weights
        self._unblocked(spans[-1].end)
        self.scheduler.completed(batch)
        if sampled.prompt_logprobs:
            _accept_prompt_logprobs(batch.chunks, sampled.prompt_logprobs)
        if batch.draft_tokens:
            record.accepted = self._accept_runs(batch.sampled, batch.draft_tokens, sampled, now, events)
        else:
            self._accept(batch.sampled, sampled, now, events)

    def _observe(self, record: MicroBatchRecord, spans: list[Span]) -> None:
        """Let the policy and its speculative decoding learn from spans."""
        self.scheduler.observe(record, spans)
        if self.scheduler.speculative_decoding is not None:
            self.scheduler.speculative_decoding.observe(record, spans)

    def _accept(self, requests: list[Request], sampled: Sampled, now: float, events: list[TokenEvent]) -> None:
        """Append to each request its sampled token; finish the requests that end with it, resume the others."""
        tokens, logprobs = sampled.tokens, sampled.logprobs
        assert len(requests) == len(tokens), (requests, tokens)
        rows: Sequence[int] = range(len(requests))
        if any(request.finish_reason is not None for request in requests):  # ended while in flight
            rows = [row for row in rows if requests[row].finish_reason is None]
        append_to_each([requests[row].record.token_times for row in rows if tokens[row] >= 0], now)
        any_ended = len(rows) < len(requests)
        for row in rows:
            logprob = logprobs.get(row) if logprobs else None
            if self._append(requests[row], tokens[row], logprob, now, events):
                any_ended = True
        self.scheduler.resume([r for r in requests if r.finish_reason is None] if any_ended else requests)

    def _accept_runs(
        self,
        requests: list[Request],
        drafts: dict[int, list[int]],
        sampled: Sampled,
        now: float,
        events: list[TokenEvent],
    ) -> int:
        """Like `_accept`, for speculative decodes.

        Append to each request its tokens up to and including the first that differs from the draft. Tokens of later
        rows were conditioned on a rejected draft, and are dropped.

        Returns:
            The number of accepted draft tokens.
        """
        tokens, logprobs = sampled.tokens, sampled.logprobs
        total = end = 0
        for request in requests:
            row, guess = end, drafts.get(request.id) or []
            end += 1 + len(guess)
            if request.finish_reason is not None:  # aborted while in flight
                continue
            count = 0
            while True:
                token = tokens[row + count]
                if token >= 0:
                    request.record.token_times.append(now)
                is_last = self._append(request, token, logprobs.get(row + count), now, events)
                if is_last or count == len(guess) or token != guess[count]:
                    break
                count += 1
            self.scheduler.accepted(request, count)
            total += count
        assert end == len(tokens), (end, tokens)
        self.scheduler.resume([r for r in requests if r.finish_reason is None])
        return total

    def _append(
        self, request: Request, token: int, logprobs: TokenLogprobs | None, now: float, events: list[TokenEvent]
    ) -> bool:
        """Append a sampled token to its request, and finish the request if this token ends it.

        Returns:
            Whether the request ended.
        """
        if token < 0:  # the model's logits were not finite
            self._finish(request, "error", now)
            events.append(TokenEvent(request, None, None, now, True))
            return True
        request.output.append(token)
        reason = request.finish_reason_after(token)
        if self._stop_check is not None:
            reason = self._stop_check(request, token, logprobs) or reason
        if reason is not None:
            self._finish(request, reason, now)
        if reason is not None or not self._ends_only:
            events.append(TokenEvent(request, token, logprobs, now, reason is not None))
        return reason is not None

    def _finish(self, request: Request, reason: str, now: float) -> None:
        self.scheduler.finish(request, reason)
        entry = request.record
        entry.finished, entry.finish_reason, entry.preemptions = now, reason, request.preemptions

    def _block(self, reason: str) -> None:
        if self._blocked_since is None:
            self._blocked_since = self.clock.now()
        self._blocked_by = reason  # type: ignore[assignment]

    def _unblocked(self, at: float) -> None:
        """End the wait at `at`, when its reason ended. The time from then until the dispatch is control time."""
        if self._blocked_since is not None:
            if at > self._blocked_since:
                self._waits.append(Wait(self._blocked_since, at, self._blocked_by))
            self._blocked_since = None


def _segment(chunk: Chunk, now: float, new: list[NewRequest]) -> SegmentMessage:
    """Return the message for a chunk.

    If it is the first chunk of its request that the ranks receive, append a `NewRequest` to `new`.
    """
    request, start = chunk.request, chunk.start
    if request.num_blocks_sent == 0:
        past = request.tokens_in(0, start) if request.params.depends_on_past else ()
        new.append(
            NewRequest(request.id, request.prompt_len, request.seed, request.params, request.eos_token_ids, past)
        )
        if request.record.first_dispatched is None:
            request.record.first_dispatched = now
    tokens, targets = request.tokens_in(start, start + chunk.length), request.targets_of(start, chunk.length)
    return SegmentMessage(request.id, start, tokens, request.take_new_blocks(), chunk.ends_prefill, targets)


def _accept_prompt_logprobs(chunks: list[Chunk], found: dict[int, list[TokenLogprobs]]) -> None:
    """Store prompt log-probabilities with their requests. After a preemption they are computed and stored again."""
    for place, logprobs in found.items():
        known = chunks[place].request.prompt_logprobs
        assert known is not None, chunks[place].request
        known[chunks[place].start : chunks[place].start + len(logprobs)] = logprobs


def _decodes(batch: MicroBatch) -> DecodesMessage:
    """Return the message for the decodes of a micro-batch, whose newest tokens have just been counted as dispatched."""
    ids, starts, tokens = IntColumn(), IntColumn(), IntColumn()
    blocks: dict[int, list[int]] = {}
    drafts = batch.draft_tokens
    for request in batch.decodes:
        start = request.num_dispatched - 1
        ids.append(request.id)
        starts.append(start)
        tokens.append(request.output[-1] if start < request.num_tokens else UNSEEN_TOKEN)
        if drafts:
            for token in drafts.get(request.id) or []:
                start += 1
                ids.append(request.id)
                starts.append(start)
                tokens.append(token)
        if len(request.blocks) > request.num_blocks_sent:
            blocks[request.id] = request.take_new_blocks()
    return DecodesMessage(ids.packed, starts.packed, tokens.packed, blocks, batch.num_draft_tokens)
