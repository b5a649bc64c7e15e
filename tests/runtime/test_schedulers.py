"""Every policy, driven by the coordinator over a virtual pipeline, on random workloads. No torch."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.conf.policies import POLICY_CONFIGS, OrcaBestConfig, RequestLevelConfig, SarathiConfig, SchedulerConfig
from gapless.conf.sampling import SamplingParams
from gapless.runtime.blocks import BlockPool
from gapless.runtime.coordinator import Coordinator
from gapless.runtime.ledger import Ledger
from gapless.runtime.messages import Step
from gapless.runtime.micro_batch import MicroBatch
from gapless.runtime.request import Request
from gapless.runtime.scheduler import POLICIES, Limits, make_scheduler
from gapless.runtime.scheduler.sarathi import Sarathi

sys.path.insert(0, str(Path(__file__).parent))
from virtual_pipeline import VirtualPipeline

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
    }


def config_of(policy: str, w: dict) -> SchedulerConfig:
    if policy == "sarathi":
        return SarathiConfig(chunk=w["chunk"], tile=w["tile"])
    return {"orca_best": OrcaBestConfig, "request_level": RequestLevelConfig}[policy]()


def run(policy: str, w: dict) -> tuple[Coordinator, VirtualPipeline, list[Request]]:
    rng = random.Random(w["seed"])

    def stage_time(step: Step, stage: int) -> float:
        return (0.01 + 0.001 * step.num_tokens) * rng.uniform(0.5, 2.0)

    depth = w["stages"] + w["extra_depth"]
    pipeline = VirtualPipeline(w["stages"], depth, w["num_blocks"], w["block_size"], stage_time)
    pool = BlockPool(w["num_blocks"], w["block_size"], -(-w["max_len"] // w["block_size"]))
    scheduler = make_scheduler(config_of(policy, w), Limits(w["batch"], depth, w["tile"]), pool)
    coordinator = Coordinator(pipeline, scheduler)
    arrivals = sorted(w["requests"], key=lambda r: r[2])
    requests = [
        Request(
            i,
            [rng.randrange(1000) for _ in range(prompt)],
            SamplingParams(max_tokens=output, ignore_eos=ignore),
            arrival=at,
            max_model_len=w["max_len"],
            eos_token_ids=(EOS,),
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
        assert len(scheduler.running) <= scheduler.limits.running
    else:
        pytest.fail("starved: the workload never ended")
    assert not waiting
    return coordinator, pipeline, requests


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=120, deadline=None)
@given(w=workloads())
def test_nothing_is_lost_and_no_bound_is_passed(policy: str, w: dict) -> None:
    coordinator, pipeline, requests = run(policy, w)
    for r in requests:
        ended = r.num_output == r.max_output or r.tokens[-1] == EOS or r.finish_reason == "abort"
        assert r.is_finished, r
        assert ended, r
        assert r.num_output >= 1 or r.finish_reason == "abort"
        assert EOS not in r.tokens[r.prompt_len : -1] or r.params.ignore_eos
    pool = coordinator.scheduler.pool
    assert pool.num_free == pool.num_blocks, "blocks leaked"
    scheduler = coordinator.scheduler
    assert not [*scheduler.ready, *scheduler.prefilling, *scheduler.running]
    for step in pipeline.steps:
        check_rule(policy, w, step)
    for entry in coordinator.record.requests:
        assert entry.token_times == sorted(entry.token_times)
        assert entry.output_tokens == requests[entry.request].num_output


def check_rule(policy: str, w: dict, step: Step) -> None:
    """The policy's rule of the design's table, on one micro-batch."""
    B, chunks, decodes = w["batch"], step.chunks, step.decodes
    assert len(chunks) + len(decodes) <= B
    if policy == "sarathi":
        assert len(chunks) <= 1
        if chunks:
            overhang = step.num_tokens % w["tile"]
            assert step.num_tokens <= w["chunk"]
            assert overhang == 0 or step.num_tokens < w["tile"] or len(chunks[0].tokens) <= overhang
    elif policy == "orca_best":
        assert len(chunks) <= 1
        assert all(c.start == 0 and c.sample for c in chunks), "a prompt enters whole"
    elif policy == "request_level":
        assert not (chunks and decodes), "a batch prefills, then decodes"
        assert all(c.start == 0 and c.sample for c in chunks)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=40, deadline=None)
@given(w=workloads())
def test_the_ledger_conserves_time(policy: str, w: dict) -> None:
    coordinator, _, _ = run(policy, w)
    Ledger(coordinator.record).check()


@settings(max_examples=60, deadline=None)
@given(w=workloads())
def test_outputs_do_not_depend_on_policy_memory_or_preemption(w: dict) -> None:
    w["abort"] = None
    roomy = w | {"num_blocks": 100 * w["num_blocks"], "batch": 50, "stages": 1, "extra_depth": 0}
    reference = [r.tokens for r in run("sarathi", roomy)[2]]
    for policy in POLICIES:
        assert [r.tokens for r in run(policy, w)[2]] == reference


def test_every_policy_of_the_schema_exists() -> None:
    assert set(POLICIES) == set(POLICY_CONFIGS)


def test_a_tight_cache_preempts_the_newest() -> None:
    w = {
        "block_size": 4,
        "max_len": 64,
        "num_blocks": 20,
        "batch": 4,
        "stages": 2,
        "extra_depth": 0,
        "chunk": 16,
        "tile": 1,
        "seed": 0,
        "abort": None,
        "requests": [(16, 40, 0.0, True)] * 4,
    }
    _, _, requests = run("sarathi", w)
    preemptions = [r.preemptions for r in requests]
    assert preemptions[0] == 0
    assert sum(preemptions) > 0


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
        "requests": [(150, 2, 0.0, True)],
    }
    coordinator, pipeline, _ = run("sarathi", w)
    assert pipeline.max_outstanding == 3
    first, second = coordinator.record.steps[:2]
    assert first.chunks[0].request == second.chunks[0].request
    assert second.dispatched < first.completed


@pytest.mark.parametrize(
    ("remaining", "decodes", "expected"),
    [
        (1000, 0, 256),  # the whole chunk
        (1000, 26, 230),  # C - (B - 1): chunk and decodes come to C
        (1000, 1, 255),
        (200, 10, 118),  # 210 tokens are cut back to one tile
        (100, 10, 100),  # below one tile there is nothing to align
        (118, 10, 118),  # exactly one tile
        (3, 200, 3),  # decodes alone pass a tile: the rest of the prompt is not cut to nothing
    ],
)
def test_chunk_and_decodes_come_to_a_multiple_of_the_tile(remaining: int, decodes: int, expected: int) -> None:
    scheduler = Sarathi(SarathiConfig(chunk=256, tile=128), Limits(27, 1), BlockPool(1, 16))
    assert scheduler.chunk_length(remaining, decodes) == expected


@settings(max_examples=100, deadline=None)
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


def test_block_pool_keeps_a_growing_request_contiguous() -> None:
    pool = BlockPool(64, 4, 16)
    owned: list[list[int]] = [[], [], []]
    for tokens in range(1, 65):
        for blocks in owned:
            pool.grow(blocks, tokens)
    assert all(blocks == list(range(blocks[0], blocks[0] + 16)) for blocks in owned)


def test_an_empty_micro_batch_is_false() -> None:
    assert not MicroBatch()
