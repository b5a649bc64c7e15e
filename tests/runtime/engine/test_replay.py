"""Requests that arrive over time: on a virtual clock, with every step audited, and through an LLM on one rank."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless import LLM
from gapless.conf.policies import POLICY_CONFIGS, Depth, SarathiConfig
from gapless.conf.sampling import SamplingParams
from gapless.conf.workloads import FixedConfig
from gapless.models.tokenizer import ByteTokenizer
from gapless.runtime.analysis.ledger.ledger import Ledger
from gapless.runtime.core.block_pool import BlockPool
from gapless.runtime.core.messages import MicroBatchResult
from gapless.runtime.core.micro_batch import MicroBatch
from gapless.runtime.core.request import Request
from gapless.runtime.core.work_item import WorkItem
from gapless.runtime.engine.coordinator import Coordinator, TokenEvent
from gapless.runtime.engine.replay import replay
from gapless.runtime.pipeline.protocol import PipelineError
from gapless.runtime.scheduler import Limits
from gapless.runtime.scheduler.policies import make_scheduler
from gapless.runtime.scheduler.policies.sarathi import Sarathi
from gapless.runtime.simulation.workload import make_workload
from tests.support.closed_loops import loop
from tests.support.tiers import examples
from tests.support.virtual_pipeline import VirtualPipeline


class Punctual(VirtualPipeline):
    """One that gives up waiting at the deadline, as real ones do."""

    def wait(self, deadline: float) -> list[MicroBatchResult]:
        if self._results and self._results[0][0] > deadline:
            self.now_s = max(self.now_s, deadline)
            return []
        return super().wait(deadline)


class Bed:
    """A coordinator over a virtual pipeline, and the requests that were made."""

    def __init__(self, policy: str = "sarathi", stages: int = 2, step_s: float = 0.01) -> None:
        self.pipeline = Punctual(stages, stages + 1, 400, 4, lambda micro_batch, stage: step_s)
        limits = Limits(batch=4, depth=Depth.fixed(stages), num_stages=stages)
        scheduler = make_scheduler(POLICY_CONFIGS[policy](), limits, BlockPool(400, 4, 50))
        self.coordinator = Coordinator(self.pipeline, scheduler)
        self.made: list[Request] = []
        self.added_at: list[float] = []

    def make(self, item: WorkItem, arrival: float) -> Request:
        params = SamplingParams(max_tokens=item.output_len, ignore_eos=True)
        self.made.append(Request(len(self.made), item.prompt, params, arrival=arrival, user=item.user))
        self.added_at.append(self.pipeline.now())
        return self.made[-1]

    def run(self, items: list[WorkItem], most: int | None = None) -> Iterator[list[TokenEvent]]:
        return replay(self.coordinator, items, self.make, workload=loop(most))


def items_of(gaps: list[float], lengths: list[tuple[int, int]]) -> list[WorkItem]:
    arrivals = itertools.accumulate(gaps)
    return [WorkItem([7] * p, d, at) for at, (p, d) in zip(arrivals, lengths, strict=False)]


ITEMS = st.builds(
    items_of,
    st.lists(st.just(0.0) | st.floats(0, 3), min_size=1, max_size=12),
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20)), min_size=12, max_size=12),
)


@given(ITEMS, st.none() | st.integers(1, 4), st.sampled_from(sorted(POLICY_CONFIGS)))
@settings(max_examples=examples(40))
def test_every_request_arrives_when_due_and_gets_its_tokens(
    items: list[WorkItem], most: int | None, policy: str
) -> None:
    bed = Bed(policy)
    unfinished = 0
    tokens: dict[int, int] = {}
    for events in bed.run(items, most):
        for event in events:
            tokens[event.request.id] = tokens.get(event.request.id, 0) + 1
        unfinished = sum(not request.is_finished for request in bed.made)
        assert most is None or unfinished <= most
    assert unfinished == 0
    assert [tokens[n] for n in range(len(items))] == [item.output_len for item in items]
    arrivals = [request.arrival for request in bed.made]
    assert arrivals == sorted(arrivals)
    for item, request, added in zip(items, bed.made, bed.added_at, strict=True):
        assert request.arrival >= item.arrival
        assert request.arrival <= added
        if most is None:
            assert request.arrival == item.arrival
            assert added - item.arrival < 1e-9, "it is seen at once, whatever is under way"
    Ledger(bed.coordinator.record).check()


def test_what_is_held_back_arrives_when_it_is_let_in() -> None:
    bed = Bed()
    for _ in bed.run(items_of([0.0] * 3, [(4, 5)] * 3), most=1):
        pass
    ends = [request.token_times[-1] for request in bed.coordinator.record.requests]
    assert [request.arrival for request in bed.made] == [0.0, ends[0], ends[1]]


def test_idle_time_before_an_arrival_is_starved() -> None:
    bed = Bed(stages=1)
    for _ in bed.run(items_of([0.0, 50.0], [(4, 5)] * 2)):
        pass
    starved = {str(k): v for k, v in Ledger(bed.coordinator.record).seconds_by_cause().items() if v}
    assert starved["starved_no_request"] == pytest.approx(50.0 - 5 * 0.01)


class InPairs(Sarathi):
    """Begins once two requests have come."""

    def fill(self, batch: MicroBatch) -> None:
        if self.running or self.num_waiting > 1:
            super().fill(batch)


def test_a_policy_may_wait_for_what_is_still_to_come() -> None:
    bed = Bed(stages=1)
    limits, pool = bed.coordinator.scheduler.limits, bed.coordinator.scheduler.pool
    bed.coordinator.scheduler = InPairs(SarathiConfig(), limits, pool)
    run = bed.run(items_of([0.0, 50.0, 50.0], [(4, 5)] * 3))
    with pytest.raises(PipelineError, match=r"^scheduler stalled: 1 unfinished requests"):
        list(run)
    assert [request.finish_reason for request in bed.made] == ["length", "length", "abort"]


def test_leaving_early_aborts_what_is_unfinished() -> None:
    bed = Bed()
    run = bed.run(items_of([0.0] * 3, [(4, 5), (4, 9), (4, 9)]))
    while not any(event.request.is_finished for event in next(run)):
        pass
    run.close()
    assert [request.finish_reason for request in bed.made] == ["length", "abort", "abort"]


def test_a_request_that_ends_short_fails_the_run() -> None:
    bed = Bed()
    run = bed.run(items_of([0.0], [(4, 9)]))
    next(run)
    bed.made[0].max_len = bed.made[0].prompt_len + 3
    with pytest.raises(PipelineError, match=r"^request 0 ended \(length\) after 3 of 9 tokens$"):
        list(run)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("tiny", **{"parallel.threads": 1, "cache.num_blocks": 64, "scheduler.chunk": 16}) as llm:
        yield llm


def test_an_llm_replays_a_workload(llm: LLM) -> None:
    config = FixedConfig(num_prompts=6, input_len=20, output_len=4, range_ratio=0.5, request_rate=100.0, users=2)
    workload = make_workload(config, vocab_size=512, context=llm.max_model_len, tokenizer=ByteTokenizer(512))
    llm.reset(SarathiConfig(order="fair_share"))
    begin = llm._coordinator.clock.now()
    assert sum(map(len, llm.replay(workload, workload=loop(3)))) == workload.output_lens.sum()
    record = llm.record
    assert [request.prompt_tokens for request in record.requests] == workload.input_lens.tolist()
    assert [request.output_tokens for request in record.requests] == workload.output_lens.tolist()
    assert all(r.arrival - begin >= at for r, at in zip(record.requests, workload.arrivals, strict=True))
    Ledger(record).check()
    expected = llm.generate([workload[2].prompt], SamplingParams(max_tokens=4, ignore_eos=True))[0].outputs[0].token_ids
    llm.reset()
    answer = [e.token for events in llm.replay(workload[2:3]) for e in events if e.token is not None]
    assert answer == expected[: workload[2].output_len]


def test_users_and_deadlines_reach_the_orders(llm: LLM) -> None:
    request = llm._timed(WorkItem([5, 6], 3, 1.0, "ann", 0.25), 11.0)
    assert (request.user, request.arrival, request.deadline) == ("ann", 11.0, 11.25)
    assert (request.params.is_greedy, request.params.ignore_eos, request.max_len) == (True, True, 5)
    assert llm._timed(WorkItem([5, 6], 3, 1.0), 11.0).deadline is None


def test_one_thing_at_a_time(llm: LLM) -> None:
    llm.reset()
    run = llm.replay([WorkItem([5] * 8, 9, 0.0)])
    next(run)
    with pytest.raises(ValueError, match="a replay is unfinished"):
        llm.generate([[5]])
    with pytest.raises(ValueError, match="a replay is unfinished"):
        llm.reset()
    with pytest.raises(ValueError, match="other requests are unfinished"):
        next(llm.replay([WorkItem([5], 1, 0.0)]))
    run.close()
    llm.reset()
    assert len(llm.generate([[5]], SamplingParams(max_tokens=2))) == 1


def test_what_cannot_fit_is_named(llm: LLM) -> None:
    llm.reset()
    with pytest.raises(ValueError, match="prompt 1 has 3000 tokens: the context is 2048"):
        list(llm.replay([WorkItem([5], 1, 0.0), WorkItem([5] * 3000, 1, 0.0)]))
    with pytest.raises(ValueError, match="prompt 0 may reach 1100 tokens"):
        list(llm.replay([WorkItem([5] * 1000, 100, 0.0)]))
