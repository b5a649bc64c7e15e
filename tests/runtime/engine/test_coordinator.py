"""The coordinator over a pipeline whose results, clock and faults a test gives by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from gapless.conf.policies import Depth, TokenBudgetConfig
from gapless.conf.sampling import SamplingParams
from gapless.runtime.core.block_pool import BlockPool
from gapless.runtime.core.columns import unpack
from gapless.runtime.core.messages import (
    UNSEEN_TOKEN,
    MicroBatchMessage,
    MicroBatchResult,
    Sampled,
    Span,
    TokenLogprobs,
)
from gapless.runtime.core.request import Request
from gapless.runtime.core.run_record import FaultRecord, Wait
from gapless.runtime.engine.coordinator import Coordinator
from gapless.runtime.pipeline.protocol import PipelineError, PipelineFault
from gapless.runtime.scheduler import Limits, Scheduler
from gapless.runtime.scheduler.policies import make_scheduler

STAGES, BLOCK = 2, 4


class HandPipeline:
    """Keeps what was submitted. `wait` gives what the test has put into `results`, at the time that it has set."""

    depth = STAGES
    num_blocks = 40

    def __init__(self) -> None:
        self.now_s = 0.0
        self.clock = self
        self.num_stages = STAGES
        self.where = [""] * STAGES
        self.submitted: list[MicroBatchMessage] = []
        self.results: list[MicroBatchResult] = []
        self.fault: PipelineFault | None = None
        self.repairs: list[FaultRecord] = []
        self.stands = False  # the next wait ends the repair

    def now(self) -> float:
        return self.now_s

    def submit(self, micro_batch: MicroBatchMessage) -> None:
        self.submitted.append(micro_batch)

    def wait(self, deadline: float) -> list[MicroBatchResult]:
        if self.fault is not None:
            fault, self.fault = self.fault, None
            raise fault
        if self.stands:
            self.stands, self.repairs[-1].up = False, self.now_s
        results, self.results = self.results, []
        return results

    def restart(self, fault: FaultRecord) -> None:
        self.repairs.append(fault)

    def close(self) -> None:
        pass


class Bed:
    def __init__(self, batch: int = 4, drafts: int = 0, caching: bool = False, looks_ahead: bool = False) -> None:
        self.pipeline = HandPipeline()
        self.batch, self.drafts, self.caching, self.looks_ahead = batch, drafts, caching, looks_ahead
        self.coordinator = Coordinator(self.pipeline, self.scheduler(STAGES), on_fewer_stages=self.scheduler)
        self.count = 0

    def scheduler(self, stages: int) -> Scheduler:
        config = TokenBudgetConfig(max_batched_tokens=32, drafts=self.drafts)
        pool = BlockPool(self.pipeline.num_blocks, BLOCK, prefix_caching=self.caching)
        depth = Depth.fixed(1 if self.looks_ahead else stages)
        return make_scheduler(config, Limits(self.batch, depth, 8, stages, self.looks_ahead), pool)

    def add(self, prompt: Sequence[int] = (1, 2, 3, 4, 5), arrival: float = 0.0, **params: Any) -> Request:
        params = {"max_tokens": 10, "ignore_eos": True} | params
        request = Request(self.count, prompt, SamplingParams(**params), arrival=arrival)
        self.count += 1
        self.coordinator.add(request)
        return request

    def dispatch(self) -> None:
        self.coordinator.step(self.pipeline.now_s)

    def end(self, number: int, tokens: Sequence[int], end: float, epoch: int = 0, **sampled: Any) -> MicroBatchResult:
        """End a micro-batch on the last stage at a time."""
        span = Span(number, STAGES - 1, end - 1, end - 1, end - 1, end, end)
        return MicroBatchResult(epoch, number, [span], Sampled(list(tokens), **sampled))

    def take(self, *results: MicroBatchResult) -> list[tuple[int, int | None]]:
        """Hand results to the coordinator; return the tokens that it gives, by request."""
        self.pipeline.results = list(results)
        return [(event.request.id, event.token) for event in self.coordinator.step(self.pipeline.now_s)]

    def fail(self, since: float, at: float) -> None:
        self.pipeline.now_s = at
        self.pipeline.fault = PipelineFault("a fault", "process", since)
        self.dispatch()

    def stand(self, at: float) -> None:
        self.pipeline.now_s, self.pipeline.stands = at, True
        self.dispatch()


def test_a_wait_ends_when_what_it_waited_for_happened_and_not_when_it_is_heard() -> None:
    bed = Bed()
    bed.pipeline.now_s = 2.0  # since 0 there is no request
    bed.add(arrival=1.5)
    bed.dispatch()
    bed.pipeline.now_s = 5.0
    bed.take(bed.end(0, [7], 4.0))
    first, second = bed.coordinator.record.micro_batches
    assert first.waits == [Wait(0.0, 1.5, "no_request")]
    assert (first.dispatched, first.completed) == (2.0, 5.0)
    assert second.waits == [Wait(2.0, 4.0, "in_flight")], "its own time, until 5, is no wait"
    bed.pipeline.now_s = 9.0
    bed.take(bed.end(1, [7], 9.0))
    assert bed.coordinator.record.micro_batches[2].waits == [Wait(5.0, 9.0, "in_flight")]


def test_a_result_of_an_epoch_that_has_ended_is_dropped() -> None:
    bed = Bed()
    request = bed.add()
    bed.dispatch()
    bed.fail(since=0.5, at=1.0)
    late = bed.end(0, [7], 0.9)
    assert bed.take(late) == []
    bed.stand(2.0)
    assert [(m.epoch, m.micro_batch) for m in bed.pipeline.submitted] == [(0, 0), (1, 1)]
    for number in (0, 1):  # also where its number is that of one in flight
        assert bed.take(bed.end(number, [8], 0.9, epoch=0)) == []
    assert bed.coordinator.record.spans == []
    assert bed.take(bed.end(1, [9], 3.0, epoch=1)) == [(0, 9)]
    assert request.output == [9]


def test_the_time_of_a_fault_is_waited_for_from_its_begin_to_its_repair() -> None:
    bed = Bed()
    bed.add()
    bed.dispatch()
    bed.fail(since=3.0, at=4.0)  # since 0 the request was in flight
    bed.fail(since=4.5, at=5.0)  # the repair has failed
    assert bed.coordinator.is_recovering
    bed.coordinator.check_progress()
    assert [(fault.since, fault.detected, fault.up) for fault in bed.coordinator.record.faults] == [
        (3.0, 4.0, 5.0),
        (5.0, 5.0, None),
    ]
    bed.stand(7.0)
    waits = [Wait(0.0, 3.0, "in_flight"), Wait(3.0, 5.0, "recovery"), Wait(5.0, 7.0, "recovery")]
    assert bed.coordinator.record.micro_batches[1].waits == waits
    assert [fault.requests for fault in bed.coordinator.record.faults] == [1, 0], "it waits since the first"


def test_requests_go_on_in_their_order_with_fewer_stages() -> None:
    bed = Bed(batch=1, caching=True)
    requests = [bed.add([n] * 9) for n in range(4)]
    bed.dispatch()
    before = bed.coordinator.scheduler
    assert before.pool.cache is not None
    before.pool.cache.hits = 3
    bed.fail(since=1.0, at=1.0)
    bed.pipeline.num_stages = 1
    bed.stand(2.0)
    after = bed.coordinator.scheduler
    assert after is not before
    assert after.pool.cache is not None
    assert (after.pool.cache.queries, after.pool.cache.hits) == (18, 3), "a prompt counts once"
    assert [chunk.request for m in bed.pipeline.submitted for chunk in m.chunks] == [0, 1, 0]
    assert sorted(request.id for request in after.waiting) == [1, 2, 3]
    assert after.waiting.head() is requests[1]
    assert requests[3].num_dispatched == 0


def test_a_policy_that_takes_nothing_is_noticed_and_a_repair_is_not_taken_for_one() -> None:
    bed = Bed()
    bed.coordinator.check_progress()
    request = bed.add()
    with pytest.raises(PipelineError, match="scheduler stalled: 1 unfinished requests, none in flight"):
        bed.coordinator.check_progress()
    bed.dispatch()
    bed.coordinator.check_progress()
    bed.coordinator.abort(request)
    assert bed.coordinator.has_work, "it is on its way through the pipeline"
    assert bed.take(bed.end(0, [7], 1.0)) == []
    assert not bed.coordinator.has_work
    assert (request.output, request.record.token_times, request.record.finish_reason) == ([], [], "abort")


def test_spans_of_every_stage_are_kept_in_the_order_in_which_they_come() -> None:
    bed = Bed()
    bed.add()
    bed.dispatch()
    first, others = Span(0, 0, 0, 0, 0, 1, 1), [Span(0, 1, 0, 1, 1, 2, 2), Span(0, 2, 0, 2, 2, 3, 3)]
    assert bed.take(MicroBatchResult(0, 0, [first])) == []
    assert bed.take(MicroBatchResult(0, 0, others, Sampled([5]))) == [(0, 5)]
    assert bed.coordinator.record.spans == [first, *others]


def logprobs_of(*tokens: int) -> list[TokenLogprobs]:
    return [TokenLogprobs(-float(token), token, []) for token in tokens]


def test_log_probabilities_of_a_prompt_come_once_also_after_a_fault() -> None:
    bed = Bed()
    request = bed.add(range(1, 41), prompt_logprobs=0)
    bed.dispatch()
    first, rest = bed.coordinator.record.micro_batches
    assert (first.sampled_rows, rest.sampled_rows) == (32, 8), "a row for each of their tokens"
    assert [chunk.targets for m in bed.pipeline.submitted for chunk in m.chunks] == [
        list(range(2, 34)),
        list(range(34, 41)),
    ]
    bed.take(bed.end(0, [], 1.0, prompt_logprobs={0: logprobs_of(*range(2, 34))}))
    bed.fail(since=2.0, at=2.0)
    bed.stand(3.0)
    bed.take(
        bed.end(2, [], 4.0, epoch=1, prompt_logprobs={0: logprobs_of(*range(2, 34))}),
        bed.end(3, [7], 5.0, epoch=1, prompt_logprobs={0: logprobs_of(*range(34, 41))}),
    )
    assert request.prompt_logprobs == logprobs_of(*range(2, 41))
    assert request.output == [7]


def test_a_token_that_no_number_is_ends_its_request_alone() -> None:
    bed = Bed()
    bad, good = bed.add(), bed.add([9, 9])
    bed.dispatch()
    bed.pipeline.now_s = 2.0
    assert bed.take(bed.end(0, [-1, 0], 1.0)) == [(0, None), (1, 0)]
    assert (bad.finish_reason, bad.output, bad.record.token_times) == ("error", [], [])
    assert (good.output, good.record.token_times) == ([0], [2.0]), "0 is a token"


def test_a_decode_follows_before_its_token_is_seen() -> None:
    bed = Bed(looks_ahead=True)
    first, last = bed.add(), bed.add([9, 9], max_tokens=1)
    penalized = bed.add([8], presence_penalty=1.0)
    bed.dispatch()
    assert bed.take(bed.end(0, [7, 8, 9], 1.0)) == [(0, 7), (1, 8), (2, 9)]
    assert (last.finish_reason, first.output, penalized.output) == ("length", [7], [9])
    bed.take(bed.end(1, [4], 2.0))
    decodes = [m.decodes for m in bed.pipeline.submitted]
    assert [unpack(each.requests).tolist() for each in decodes] == [[], [0], [0, 2], [0]]
    assert [unpack(each.tokens).tolist() for each in decodes] == [[], [UNSEEN_TOKEN], [UNSEEN_TOKEN, 9], [UNSEEN_TOKEN]]


@pytest.mark.parametrize(
    ("token", "reason", "events"),
    [(3, "stop", [(0, 3)]), (-1, "error", [(0, None)]), (5, "abort", [])],
)
def test_what_follows_the_end_of_a_request_is_dropped(token: int, reason: str, events: list[Any]) -> None:
    bed = Bed(caching=True, looks_ahead=True)
    request = bed.add([1] * 8, stop_token_ids=(3,))
    pool = bed.coordinator.scheduler.pool
    bed.dispatch()
    if reason == "abort":
        bed.coordinator.abort(request)
    assert bed.take(bed.end(0, [token], 1.0)) == events
    assert pool.num_used > 0, "its decode is in flight"
    again = bed.add([1] * 8)
    bed.dispatch()
    assert again.record.cached_tokens == (0 if reason == "error" else 4), "what is not finite is not shared"
    bed.take(bed.end(1, [6], 2.0))
    assert (request.finish_reason, request.output) == (reason, [token] if reason == "stop" else [])
    assert bed.take(bed.end(2, [7], 3.0)) == [(1, 7)]
    assert [m.dropped for m in bed.pipeline.submitted][2:] == [[], [0], []], "ranks keep it as long"
    assert len(request.record.token_times) == len(request.output)
    bed.coordinator.abort(again)
    for number in (3, 4):
        bed.take(bed.end(number, [7], 4.0))
    assert pool.num_used == 0
