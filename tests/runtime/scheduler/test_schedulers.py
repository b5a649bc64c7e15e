"""Every policy, driven by the coordinator over a virtual pipeline, on random workloads. No torch."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gapless.conf.policies import POLICY_CONFIGS, Depth, SarathiConfig, SchedulerConfig
from gapless.conf.sampling import SamplingParams
from gapless.runtime.analysis.ledger.ledger import Ledger
from gapless.runtime.analysis.ledger.token_intervals import TokenIntervals
from gapless.runtime.core.block_pool import BlockPool
from gapless.runtime.core.messages import MicroBatchMessage
from gapless.runtime.core.micro_batch import Chunk, MicroBatch
from gapless.runtime.core.request import Request
from gapless.runtime.core.windowed_pool import WindowedPool
from gapless.runtime.engine.coordinator import Coordinator
from gapless.runtime.scheduler import ORDERS, Limits, Scheduler
from gapless.runtime.scheduler.group_scheduler import GroupScheduler
from gapless.runtime.scheduler.policies import POLICIES, find_policy, make_scheduler
from gapless.runtime.scheduler.policies.equal_time import EqualTime
from gapless.runtime.scheduler.policies.orca_best import OrcaBest
from gapless.runtime.scheduler.policies.orca_worst import OrcaWorst
from gapless.runtime.scheduler.policies.prefill_first import PrefillFirst
from gapless.runtime.scheduler.policies.sarathi import Sarathi
from gapless.runtime.scheduler.policies.token_budget import TokenBudget
from gapless.runtime.scheduler.policies.token_throttle import TokenThrottle
from tests.support.tiers import examples
from tests.support.virtual_pipeline import VirtualPipeline
from tests.support.windowed_pipeline import WindowedPipeline

EOS = 7


@st.composite
def workloads(draw: st.DrawFn) -> dict:
    block_size = draw(st.sampled_from([1, 4, 16]))
    max_len = draw(st.integers(2, 120))
    blocks_for_one = -(-max_len // block_size)
    num_blocks = draw(st.integers(blocks_for_one, 4 * blocks_for_one + 8))
    requests = draw(
        st.lists(
            st.tuples(st.integers(1, max_len - 1), st.integers(1, max_len), st.floats(0, 0.5), st.booleans()),
            min_size=1,
            max_size=14,
        )
    )
    return {
        "block_size": block_size,
        "max_len": max_len,
        "num_blocks": num_blocks,
        "requests": requests,
        "batch": draw(st.integers(1, 6)),
        "stages": draw(st.integers(1, 4)),
        "extra_depth": draw(st.integers(0, 2)),
        "chunk": draw(st.integers(1, 40)),
        "tile": draw(st.sampled_from([1, 4, 16])),
        "seed": draw(st.integers(0, 2**16)),
        "abort": draw(st.none() | st.integers(0, 13)),
        "auto": draw(st.booleans()),
        "order": draw(st.sampled_from(sorted(ORDERS))),
        "drafts": draw(st.sampled_from([0, 1, 5, 20])),
        "prefix_caching": draw(st.booleans()),
        "alike": draw(st.integers(0, 60)),
        "faults": draw(st.lists(st.floats(0, 3), max_size=3)),
        "loses_stages": draw(st.booleans()),
    }


def config_of(policy: str, w: dict) -> SchedulerConfig:
    chunk, tile = w["chunk"], w["tile"]
    own: dict[str, dict] = {
        "prefill_first": {"max_prefill_tokens": chunk},
        "sarathi": {"chunk": "auto" if w["auto"] else chunk, "tile": tile},
        "token_budget": {"max_batched_tokens": chunk},
        "token_throttle": {
            "iterations": 1 + tile // 4,
            "max_prefill_tokens": 2 * chunk,
            "min_prefill_tokens": chunk,
            "kv_reserve": 0.1,
        },
        "equal_time": {"chunk": "auto" if w["auto"] else chunk, "tile": tile, "target_ms": 15.0 if w["auto"] else None},
    }
    return POLICY_CONFIGS[policy](**own.get(policy, {}), order=w["order"], drafts=w["drafts"])


class Audit:
    """Sees each decision of a scheduler: what was there before it, and the micro-batch that came of it."""

    def __init__(self, w: dict) -> None:
        self.w = w
        self.preempted = False
        self.ever_admitted: set[int] = set()
        self.queries = 0

    def next_batch(self, s: Scheduler, decide: Callable[[], MicroBatch | None]) -> MicroBatch | None:
        self.scheduler = s
        self.preempted = False
        self.ready = [r.id for r in s.ready]
        self.partial = {r.id: r.remaining_prefill for r in s.prefilling}
        self.admitted = set(s.running)
        self.share = s.decode_share
        self.num_decodes = len(s.running) - len(s.prefilling)
        self.num_dispatched = {r.id: r.num_dispatched for r in s.ready}
        waiting = s.waiting.head()
        self.first_waiting = waiting and (waiting.id, waiting.remaining_prefill)
        self.backlog, self.depth = s.backlog, s.depth
        assert s.backlog == sum(self.partial.values()) + sum(
            r.remaining_prefill for r in (*s.waiting, *s._preemption.yielding.values()) if not r.is_finished
        )
        batch = decide()
        self.short_of_kv = s.short_of_kv or self.preempted or bool(s._preemption.yielding)
        if batch is not None and not self.w.get("windows"):  # else a chunk may be cut short
            check_rule(s, batch, self, self.w)
        return batch

    def admitted_first(self, s: Scheduler, request: Request) -> None:
        """Check what the prefix cache counts: each request's prompt once, whatever comes of it."""
        cache = s.pool.cache
        if cache is not None and not self.w.get("faults"):
            is_new = request.id not in self.ever_admitted
            assert cache.queries - self.queries == (request.prompt_len if is_new else 0)
            self.queries = cache.queries
        self.ever_admitted.add(request.id)


def audited(config: SchedulerConfig, limits: Limits, pool: BlockPool, w: dict) -> Scheduler:
    """Make the policy, under audit."""
    policy, audit = find_policy(config), Audit(w)

    class Audited(policy):  # type: ignore[misc, valid-type]
        def next_batch(self) -> MicroBatch | None:
            return audit.next_batch(self, super().next_batch)

        def admit(self) -> Request | None:
            running, waiting = len(self.running), self.waiting.head()
            request = super().admit()
            if request is not None:
                assert request is waiting
                assert self.pool.num_free >= running, "a block is left for each that ran before"
                audit.admitted_first(self, request)
            return request

        def _preempt(self, request: Request) -> None:
            audit.preempted = True
            super()._preempt(request)

    return Audited(config, limits, pool)


WORKLOAD = {
    "block_size": 4,
    "max_len": 120,
    "num_blocks": 200,
    "batch": 4,
    "stages": 2,
    "extra_depth": 0,
    "chunk": 32,
    "tile": 16,
    "seed": 0,
    "abort": None,
    "auto": False,
    "order": "fcfs",
    "drafts": 0,
}


def run(policy: str, w: dict, repeats: bool = False) -> tuple[Coordinator, VirtualPipeline, list[Request]]:
    rng = random.Random(w["seed"])

    def stage_time(micro_batch: MicroBatchMessage, stage: int) -> float:
        stalled = 30.0 if rng.random() < 0.02 else 1.0
        return (0.01 + 0.001 * micro_batch.num_tokens) * rng.uniform(0.5, 2.0) * stalled

    depth = w["stages"] + w["extra_depth"]
    repeats = repeats or w["drafts"] > 0
    windows = w.get("windows")
    pipeline = (partial(WindowedPipeline, windows=windows) if windows else VirtualPipeline)(
        w["stages"],
        depth,
        w["num_blocks"],
        w["block_size"],
        stage_time,
        repeats,
        faults=w.get("faults", ()),
        loses_stages=w.get("loses_stages", False),
        looks_ahead=w.get("looks_ahead", False),
    )
    caching = w.get("prefix_caching", False)

    def scheduler(num_stages: int) -> Scheduler:
        lane = -(-w["max_len"] // w["block_size"])
        pool = BlockPool(w["num_blocks"], w["block_size"], lane, prefix_caching=caching)
        if windows:
            own = {"windows": windows, "whole": not find_policy(config_of(policy, w)).cuts_prompts}
            pool = WindowedPool(w["num_blocks"], w["block_size"], lane, prefix_caching=caching, **own)
        limits = Limits(w["batch"], Depth(num_stages, depth), w["tile"], num_stages, pipeline.looks_ahead)
        return audited(config_of(policy, w), limits, pool, w)

    coordinator = Coordinator(pipeline, scheduler(w["stages"]), on_fewer_stages=scheduler)
    arrivals = sorted(w["requests"], key=lambda r: r[2])
    alike = [[rng.randrange(1000) for _ in range(w.get("alike", 0))] for _ in range(2)]
    requests = [
        Request(
            i,
            [*alike[i % 2], *(rng.randrange(1000) for _ in range(prompt))][:prompt],
            SamplingParams(max_tokens=output, ignore_eos=ignore, presence_penalty=float(i == w.get("penalized"))),
            arrival=at,
            max_model_len=w["max_len"],
            eos_token_ids=(EOS,),
            user=f"user {prompt % 3}",
            priority=output % 3,
            deadline=at + 0.1 * output if ignore else None,
        )
        for i, (prompt, output, at, ignore) in enumerate(arrivals)
    ]
    waiting = list(requests)
    aborting = w["abort"]
    for turn in range(100_000):
        while waiting and (waiting[0].arrival <= pipeline.now_s or not coordinator.has_work):
            pipeline.now_s = max(pipeline.now_s, waiting[0].arrival)
            coordinator.add(waiting.pop(0))
        if aborting is not None and turn == 5 and aborting < len(requests) - len(waiting):
            coordinator.abort(requests[aborting])
        if not coordinator.has_work:  # the last of them may have been aborted
            if not waiting:
                break
            continue
        coordinator.step(pipeline.now_s + 1.0)
        assert len(coordinator.scheduler.running) <= coordinator.scheduler.limits.running
        if not waiting:
            coordinator.check_progress()
    else:
        pytest.fail("starved: the workload never ended")
    assert not waiting
    return coordinator, pipeline, requests


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=examples(60))
@given(w=workloads())
def test_nothing_is_lost_and_no_bound_is_passed(policy: str, w: dict) -> None:
    check_run(*run(policy, w))


def check_run(coordinator: Coordinator, pipeline: VirtualPipeline, requests: list[Request]) -> None:
    """Check that every request has ended as it should, and that nothing is left of any."""
    for r in requests:
        ended = r.num_tokens == r.max_len or r.output[-1:] == [EOS] or r.finish_reason == "abort"
        assert r.is_finished, r
        assert ended, r
        assert r.num_output >= 1 or r.finish_reason == "abort"
        assert EOS not in r.output[:-1] or r.params.ignore_eos
    pool = coordinator.scheduler.pool
    assert pool.num_free == pool.num_blocks, "blocks leaked"
    scheduler = coordinator.scheduler
    assert not [*scheduler.ready, *scheduler.prefilling, *scheduler.running]
    for entry in coordinator.record.requests:
        assert entry.token_times == sorted(entry.token_times)
        assert entry.output_tokens == requests[entry.request].num_output
    for r in requests:
        assert r.output == pipeline.sampled(r.id)[: r.num_output], "an output that the model did not sample"
    check_record(coordinator, pipeline, requests)
    assert scheduler.speculative_decoding is None or not scheduler.speculative_decoding.num_followed


def check_record(coordinator: Coordinator, pipeline: VirtualPipeline, requests: list[Request]) -> None:
    """Check that the coordinator has recorded of a run what came to pass."""
    record, before = coordinator.record, 0.0
    first_dispatched: dict[int, float] = {}
    for m, message in zip(record.micro_batches, pipeline.micro_batches, strict=True):
        assert 0 <= m.accepted <= m.drafts < m.decode_tokens or m.drafts == m.accepted == 0
        assert m.sampled_rows == sum(chunk.sample for chunk in message.chunks) + len(message.decodes)
        assert m.num_tokens == message.num_tokens
        assert 0 < m.num_running <= m.kv_blocks_used <= pipeline.num_blocks
        for wait in m.waits:
            assert before <= wait.start < wait.end <= m.dispatched, "a wait of another micro-batch"
            before = wait.end
        before = m.dispatched
        for chunk in m.chunks:
            first_dispatched.setdefault(chunk.request, m.dispatched)
        is_lost = any(m.dispatched <= fault.since for fault in record.faults)
        assert m.completed is not None or is_lost
    for entry in record.requests:
        assert entry.first_dispatched == first_dispatched.get(entry.request)
        assert entry.preemptions == requests[entry.request].preemptions
        assert entry.finished is not None
    if not record.faults:
        numbers = [m.micro_batch for m in record.micro_batches for _ in range(record.num_stages)]
        assert sorted(span.micro_batch for span in record.spans) == numbers


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=examples(60))
@given(w=workloads(), ends_early=st.booleans())
def test_looking_ahead_changes_no_output(policy: str, w: dict, ends_early: bool) -> None:
    """Nor does it lose, double or leak anything. Where outputs end early, decodes in flight are of no use."""
    w |= {"stages": 1, "extra_depth": 0, "penalized": 1}
    _, _, expected = run(policy, w, repeats=ends_early)
    coordinator, pipeline, requests = run(policy, w | {"looks_ahead": True}, repeats=ends_early)
    check_run(coordinator, pipeline, requests)
    for r, plain in zip(requests, expected, strict=True):
        if r.id == w["abort"]:
            assert r.output[: plain.num_output] == plain.output[: r.num_output]
        else:
            assert (r.output, r.finish_reason) == (plain.output, plain.finish_reason)
    for micro_batch in coordinator.record.micro_batches:
        for decode in micro_batch.decodes:
            assert decode.start + 1 < requests[decode.request].max_len, "a decode after the last token"
    Ledger(coordinator.record).check()
    intervals = TokenIntervals(coordinator.record)
    assert intervals.table[intervals.row].sum(axis=1) == pytest.approx(intervals.seconds, abs=1e-9)
    assert intervals.table[intervals.row].min(initial=0.0) >= 0.0


@pytest.mark.parametrize("policy", POLICIES)
def test_looking_ahead_never_waits_while_a_request_may_go_on(policy: str) -> None:
    w = {
        **WORKLOAD,
        "stages": 1,
        "looks_ahead": True,
        "requests": [(20, 40, 0.0, True), (30, 40, 0.0, True)],
    }
    coordinator, pipeline, _ = run(policy, w)
    assert pipeline.max_outstanding == 2
    before, *micro_batches = coordinator.record.micro_batches[:30]
    for micro_batch in micro_batches:
        assert before.completed is not None
        assert micro_batch.dispatched < before.completed, "the stage has its next micro-batch when it ends one"
        before = micro_batch


@pytest.mark.parametrize("policy", POLICIES)
def test_outputs_do_not_depend_on_drafts(policy: str) -> None:
    w = {
        **WORKLOAD,
        "requests": [(20, 90, 0.0, True), (30, 60, 0.0, True), (9, 80, 0.1, False)],
    }
    plain, drafted = ({**w, "drafts": drafts} for drafts in (0, 6))
    _, _, without = run(policy, plain, repeats=True)
    coordinator, _, requests = run(policy, drafted, repeats=True)
    assert [(r.output, r.finish_reason) for r in requests] == [(r.output, r.finish_reason) for r in without]
    micro_batches = coordinator.record.micro_batches
    decodes = sum(m.decode_tokens - m.drafts for m in micro_batches)
    assert sum(m.accepted for m in micro_batches) > 0.5 * decodes, "outputs that come round again"


def check_rule(s: Scheduler, batch: MicroBatch, before: Audit, w: dict) -> None:
    """Check the policy's rule of the design's table, on one micro-batch and on what it was chosen from."""
    B, chunks, decodes = w["batch"], batch.chunks, batch.decodes
    free_choice = not before.short_of_kv  # else decodes may be passed over, or prompts preempted
    taken = {r.id for r in decodes}
    ids = [c.request.id for c in chunks] + [r.id for r in decodes]
    assert len(ids) == len(set(ids)) <= B
    assert taken <= set(before.ready), "a decode whose token is not back"
    if free_choice and not isinstance(s, GroupScheduler):
        assert [r.id for r in decodes] == before.ready[: len(decodes)], "first those that have been ready the longest"
    assert not (chunks and taken & {c.request.id for c in chunks})
    new = [c for c in chunks if c.request.id not in before.partial]
    assert batch.draft_tokens.keys() <= taken, "only decodes have drafts"
    assert all(1 <= len(tokens) <= w["drafts"] for tokens in batch.draft_tokens.values())
    if batch.draft_tokens:
        undrafted, tile = batch.num_tokens - batch.num_draft_tokens, s.limits.tile
        assert batch.num_tokens <= undrafted + (-undrafted % tile if chunks else tile - undrafted % tile)
        assert batch.num_tokens <= getattr(s, "max_batched_tokens", batch.num_tokens)
    tokens, whole = batch.num_prefill_tokens, all(c.request.num_blocks_sent == 0 and c.ends_prefill for c in chunks)
    if isinstance(s, GroupScheduler):
        assert whole, "a prompt enters whole"
        assert not (chunks and decodes), "a batch prefills, then decodes"
        assert len(s.groups) <= s.limits.depth.most
        assert not any(r.preemptions for r in s.running.values())
        (group,) = [g for g in s.groups if {r.id for r in g} >= set(ids)]
        assert set(ids) == {r.id for r in group}, "a group stays together"
        if isinstance(s, OrcaWorst) and len(group) > 1 and chunks:
            share = s.pool.num_blocks // s.limits.depth.most
            assert sum(s.pool.blocks_for(r.max_len) for r in group) <= share, "a group has its share of the cache"
    elif isinstance(s, OrcaBest):
        assert whole, "a prompt enters whole"
        assert len(chunks) <= 1
        if free_choice:
            assert len(decodes) == min(len(before.ready), B - len(chunks)), "every ready decode"
    elif isinstance(s, PrefillFirst):
        assert whole, "a prompt enters whole"
        assert not (chunks and decodes), "prefills and decodes are apart"
        assert tokens <= s.max_prefill_tokens or len(chunks) == 1
        if decodes and free_choice:
            assert len(decodes) == min(len(before.ready), B), "every ready decode"
    elif isinstance(s, Sarathi):
        assert len(chunks) <= 1
        if chunks:
            C, tile = s.chunk, s.limits.tile
            assert batch.num_tokens <= C
            aligned = (batch.num_tokens - batch.num_draft_tokens) % tile == 0 or len(decodes) >= C - C % tile
            assert chunks[0].ends_prefill or aligned
        assert chunks or not before.partial or not free_choice, "a prompt that has begun goes on"
        if free_choice:
            most = min(B, s.chunk) - 1 if chunks else B
            assert len(decodes) == min(len(before.ready), most), "decode-maximal"
    elif isinstance(s, TokenBudget):
        if free_choice:
            assert len(decodes) == min(len(before.ready), B), "decodes first"
        assert tokens <= max(0, s.max_batched_tokens - len(decodes)), "a non-positive rest admits nothing"
        check_prompts_in_order(chunks, new, before)
        if free_choice and (s.prefilling or s.num_waiting) and len(s.running) < s.limits.running and len(ids) < B:
            assert batch.num_tokens - batch.num_draft_tokens >= s.max_batched_tokens, "the budget is used up"
    elif isinstance(s, TokenThrottle):
        c = s.config
        assert len(decodes) <= max(1, before.share), "decodes are spread over the depth"
        backlog = max(before.backlog, s.backlog + tokens)  # a decode may have preempted another
        assert tokens <= max(c.min_prefill_tokens, min(-(-backlog // c.iterations), c.max_prefill_tokens))
        check_prompts_in_order(chunks, new, before)
    elif isinstance(s, EqualTime):
        check_decodes_are_dealt(s, batch, before)
        if free_choice and before.partial and s.target.fixed_s is None:
            assert chunks, "a prompt that has begun goes on, unless the time is promised"
        a_row = s.target.cost.per_token + s.target.cost.per_row
        if batch.draft_tokens and a_row > 0.0:
            assert batch.num_draft_tokens * a_row <= s._left_s * (1 + 1e-9), "drafts take the time that is left"
        assert all(c.ends_prefill for c in chunks[:-1]), "a prompt is cut only where the micro-batch is full"
        if len(chunks) > 1 and s.fits.best.weights is None:
            assert batch.num_tokens - batch.num_draft_tokens <= max(s.chunk, len(decodes) + chunks[0].length)
        check_prompts_in_order(chunks, new, before)
    else:
        pytest.fail(f"{type(s).__name__} has no rule here")


def check_decodes_are_dealt(s: EqualTime, batch: MicroBatch, before: Audit) -> None:
    """Check that the time of decodes is spread over the depth; only the last of them may pass its share.

    All that are ready may stay together, though, where they pass it by little beside the micro-batch's time.
    """
    dealer, decodes = s._dealer, batch.decodes
    mean = dealer.mean
    depth = before.depth if before.backlog else dealer.groups  # the decision may have chosen fewer groups
    owed = max(mean, mean * before.num_decodes / depth)
    seconds = [dealer.seconds(before.num_dispatched[r.id]) for r in decodes]
    if sum(seconds[:-1]) > (owed + mean) * (1 + 1e-6):
        assert len(decodes) == len(before.ready)
        slack = dealer._slack(depth, target_seconds(s, batch, before) if before.backlog else None)
        assert sum(seconds) <= (owed + slack) * (1 + 1e-6)


def target_seconds(s: EqualTime, batch: MicroBatch, before: Audit) -> float:
    """Return the time that the micro-batch was filled to."""
    cost = s.target.cost
    context = sum(before.num_dispatched[r.id] + 1 for r in batch.decodes)
    chunks = sum(cost.of_chunk(c.length, c.start) for c in batch.chunks)
    return s._left_s + cost.of_decodes(len(batch.decodes), context) + chunks


def check_prompts_in_order(chunks: list[Chunk], new: list[Chunk], before: Audit) -> None:
    """Partial prompts come before new ones, and none is passed over, unless the order lets one overtake."""
    if before.w["order"] in ("priority", "relative_slack"):
        return
    assert new == chunks[len(chunks) - len(new) :], "partial prompts first"
    old = [c.request.id for c in chunks if c not in new]
    kept = [id for id in before.partial if id in before.scheduler.running]
    assert old == kept[: len(old)] or before.short_of_kv


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=examples(20))
@given(w=workloads())
def test_the_ledger_conserves_time(policy: str, w: dict) -> None:
    coordinator, _, _ = run(policy, w)
    Ledger(coordinator.record).check()


DECODES_STAY_TOGETHER_BESIDE_A_LARGE_CHUNK = {
    "block_size": 1,
    "max_len": 98,
    "num_blocks": 372,
    "batch": 6,
    "stages": 1,
    "extra_depth": 1,
    "chunk": 1,
    "tile": 1,
    "seed": 1,
    "abort": None,
    "auto": True,
    "order": "deadline",
    "drafts": 0,
    "prefix_caching": False,
    "alike": 0,
    "requests": [
        (2, 1, 0.0, False),
        (4, 1, 0.0, False),
        (7, 1, 0.0, False),
        (11, 3, 0.5, False),
        (18, 3, 0.5, False),
        (37, 3, 0.5, False),
        (45, 4, 0.25, False),
        (75, 4, 0.25, False),
        (79, 6, 0.0, False),
        (92, 6, 0.0, False),
    ],
}


@settings(max_examples=examples(25))
@given(w=workloads())
@example(w=DECODES_STAY_TOGETHER_BESIDE_A_LARGE_CHUNK)
def test_outputs_do_not_depend_on_policy_memory_preemption_or_faults(w: dict) -> None:
    w["abort"] = None
    roomy = w | {
        "num_blocks": 100 * w["num_blocks"],
        "batch": 50,
        "stages": 1,
        "extra_depth": 0,
        "prefix_caching": False,
        "faults": [],
    }
    reference = [r.output for r in run("sarathi", roomy)[2]]
    for policy in POLICIES:
        assert [r.output for r in run(policy, w)[2]] == reference


def test_every_policy_of_the_schema_exists() -> None:
    assert set(POLICIES) == set(POLICY_CONFIGS)


def test_a_tight_cache_preempts_the_newest() -> None:
    w = {
        **WORKLOAD,
        "max_len": 64,
        "num_blocks": 20,
        "chunk": 16,
        "tile": 1,
        "requests": [(16, 40, 0.0, True)] * 4,
    }
    _, _, requests = run("sarathi", w)
    preemptions = [r.preemptions for r in requests]
    assert preemptions[0] == 0
    assert sum(preemptions) > 0


@pytest.mark.parametrize("looks_ahead", [False, True])
@pytest.mark.parametrize("policy", ["sarathi", "token_budget", "token_throttle", "prefill_first", "equal_time"])
def test_an_urgent_request_takes_the_place_of_the_least_urgent(policy: str, looks_ahead: bool) -> None:
    """Where slots or KV blocks are taken: of a decode, of a prompt that is partly dispatched, and of a waiting one."""
    config = POLICY_CONFIGS[policy](order="priority")
    for num_blocks, batch in ((64, 2), (16, 8)):
        limits = Limits(batch, Depth.fixed(1), looks_ahead=looks_ahead)
        scheduler = make_scheduler(config, limits, BlockPool(num_blocks, 16))
        old = [Request(n, [1] * 100, SamplingParams(max_tokens=40), priority=5 + n) for n in range(3)]
        for request in old:
            scheduler.add(request)
        for _ in range(4):
            batch_of = scheduler.next_batch()
            assert batch_of is not None
            scheduler.completed(batch_of)
            for each in batch_of.sampled:
                each.output.append(1)
            scheduler.resume(batch_of.sampled)
        assert set(scheduler.running) == {0, 1}
        urgent = Request(3, [1] * 100, SamplingParams(max_tokens=40), priority=-1)
        scheduler.add(urgent)
        in_flight = [] if not looks_ahead else [scheduler.next_batch()]
        for each in in_flight:
            if each is not None:
                scheduler.completed(each)
                for request in each.sampled:
                    request.output.append(1)
                scheduler.resume(each.sampled)
        assert scheduler.next_batch() is not None
        assert set(scheduler.running) == {0, 3}, "the least urgent has gone, and no other"
        assert [request.preemptions for request in (*old, urgent)] == [0, 1, 0, 0]
        assert not scheduler._preemption.yielding


def test_equal_priorities_never_preempt_each_other_and_no_work_is_lost_in_vain() -> None:
    scheduler = make_scheduler(SarathiConfig(order="priority"), Limits(8, Depth.fixed(1)), BlockPool(16, 16))
    for number, length, priority in ((0, 100, 0), (1, 60, 3)):
        scheduler.add(Request(number, [1] * length, SamplingParams(max_tokens=4), priority=priority))
    for _ in range(2):
        batch = scheduler.next_batch()
        assert batch is not None
        scheduler.completed(batch)
    assert set(scheduler.running) == {0, 1}
    scheduler.add(Request(2, [1] * 200, SamplingParams(max_tokens=4), priority=0))  # 13 blocks: not beside request 0
    scheduler.next_batch()
    assert set(scheduler.running) == {0, 1}
    assert scheduler.num_waiting == 1


def test_a_restart_counts_what_had_been_computed() -> None:
    scheduler = make_scheduler(SarathiConfig(chunk=32), Limits(4, Depth.fixed(2)), BlockPool(64, 16))
    for number, length in enumerate((80, 8)):
        scheduler.add(Request(number, [1] * length, SamplingParams(max_tokens=4)))
    first, in_flight = scheduler.next_batch(), scheduler.next_batch()
    assert first is not None
    assert in_flight is not None
    scheduler.completed(first)
    assert scheduler.restart() == (1, 32)
    assert (scheduler.num_waiting, scheduler.backlog, scheduler.pool.num_used) == (2, 88, 0)


def test_chunks_of_one_prompt_follow_each_other() -> None:
    w = {
        "block_size": 16,
        "max_len": 200,
        "num_blocks": 64,
        "batch": 4,
        "stages": 3,
        "extra_depth": 0,
        "chunk": 32,
        "tile": 1,
        "seed": 0,
        "abort": None,
        "auto": False,
        "order": "fcfs",
        "drafts": 0,
        "requests": [(150, 2, 0.0, True)],
    }
    coordinator, pipeline, _ = run("sarathi", w)
    assert pipeline.max_outstanding == 3
    first, second = coordinator.record.micro_batches[:2]
    assert first.chunks[0].request == second.chunks[0].request
    assert second.dispatched < first.completed


@pytest.mark.parametrize(
    ("chunk", "remaining", "decodes", "expected"),
    [
        (256, 1000, 0, 256),  # the whole chunk
        (256, 1000, 26, 230),  # C - (B - 1): chunk and decodes come to C
        (256, 1000, 1, 255),
        (300, 1000, 26, 230),  # shortened to two tiles
        (300, 250, 10, 246),  # what is left would not fit into whole tiles
        (256, 200, 10, 200),  # the last chunk is all that is left
        (256, 3, 200, 3),
        (200, 1000, 150, 50),  # decodes alone pass a tile: the chunk is not cut to nothing
        (100, 1000, 10, 90),  # below one tile there is nothing to align
    ],
)
def test_chunk_and_decodes_come_to_a_multiple_of_the_tile(
    chunk: int, remaining: int, decodes: int, expected: int
) -> None:
    scheduler = Sarathi(SarathiConfig(chunk=chunk, tile=128), Limits(27, Depth.fixed(1)), BlockPool(1, 16))
    assert scheduler.chunk_length(remaining, decodes) == expected


@settings(max_examples=examples(100))
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 80)), max_size=80), st.integers(1, 64), st.integers(1, 9))
def test_block_pool_never_shares_or_leaks(actions: list[tuple[int, int]], num_blocks: int, lane: int) -> None:
    pool = BlockPool(num_blocks, 4, lane)
    owned: dict[int, list[int]] = {}
    for who, tokens in actions:
        if who in owned and tokens % 3 == 0:
            pool.release(owned.pop(who))
        else:
            blocks = owned.setdefault(who, [])
            before, free = len(blocks), pool.num_free
            fits = pool.blocks_for(tokens) - before <= free
            assert pool.grow(blocks, tokens) == fits
            assert len(blocks) == (max(before, pool.blocks_for(tokens)) if fits else before)
        held = [b for blocks in owned.values() for b in blocks]
        assert len(held) == len(set(held)) == pool.num_used
        assert all(0 <= b < num_blocks for b in held)


def test_more_requests_than_lanes_stay_contiguous_while_there_is_room() -> None:
    pool = BlockPool(512, 16, lane_blocks=128)
    tables: list[list[int]] = [[] for _ in range(8)]
    for tokens in range(400, 480):
        for table in tables:
            assert pool.grow(table, tokens)
    assert all(table == list(range(table[0], table[0] + 30)) for table in tables)


def test_block_pool_keeps_a_growing_request_contiguous() -> None:
    pool = BlockPool(64, 4, 16)
    owned: list[list[int]] = [[], [], []]
    for tokens in range(1, 65):
        for blocks in owned:
            pool.grow(blocks, tokens)
    assert all(blocks == list(range(blocks[0], blocks[0] + 16)) for blocks in owned)


def test_an_empty_micro_batch_is_false() -> None:
    assert not MicroBatch()


@pytest.mark.parametrize("policy", ["sarathi", "equal_time"])
@pytest.mark.parametrize("at", [0.01, 0.03, 0.05])
def test_an_aborted_request_in_flight_makes_room_by_itself(policy: str, at: float) -> None:
    """An urgent request waits while tokens of a prompt that nobody wants any more are in flight."""
    prompts = [(95, 1, 0.0, False), *[(45, 93, at, False)] * 3]
    w = {"max_len": 140, "num_blocks": 36, "stages": 3, "batch": 1, "chunk": 1, "abort": 0, "order": "priority"}
    check_run(*run(policy, {**WORKLOAD, **w, "requests": prompts}))
