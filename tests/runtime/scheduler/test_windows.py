"""Every policy over a pool that frees blocks behind windows: no key is missing, and no block is lost or shared."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.conf.policies import Depth, SarathiConfig
from gapless.conf.sampling import SamplingParams
from gapless.models.block_groups import Windows, blocks_held
from gapless.runtime.core.request import Request
from gapless.runtime.core.windowed_pool import WindowedPool
from gapless.runtime.engine.coordinator import Coordinator
from gapless.runtime.scheduler import Limits
from gapless.runtime.scheduler.policies import POLICIES, find_policy, make_scheduler
from tests.runtime.core.test_prefix_cache import hashes_of
from tests.runtime.scheduler.test_schedulers import WORKLOAD, check_run, config_of, run, workloads
from tests.support.tiers import examples
from tests.support.windowed_pipeline import WindowedPipeline

WINDOWS: list[Windows] = [(5,), (None, 1), (None, 9), (None, 13, 13), (6, 6, 30), (None, None, 20)]


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=examples(100))
@given(
    w=workloads(),
    windows=st.sampled_from(WINDOWS),
    room=st.sampled_from([0, 1, 3, 10, 40]),
    looks_ahead=st.booleans(),
)
def test_every_key_within_a_window_is_there(
    policy: str, w: dict, windows: Windows, room: int, looks_ahead: bool
) -> None:
    promised = windows if find_policy(config_of(policy, w)).cuts_prompts else (None,) * len(windows)
    w |= {"windows": windows, "num_blocks": blocks_held(w["max_len"], promised, w["block_size"]) + room}
    if looks_ahead:
        w |= {"stages": 1, "extra_depth": 0, "penalized": 1, "looks_ahead": True}
    check_run(*run(policy, w))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("windows", WINDOWS, ids=str)
def test_outputs_are_those_without_freeing(policy: str, windows: Windows) -> None:
    w = {
        **WORKLOAD,
        "prefix_caching": True,
        "alike": 40,
        "requests": [(prompt, 30, 0.02 * i, True) for i, prompt in enumerate((80, 41, 60, 7, 90, 55, 80, 41))],
    }
    _, _, expected = run(policy, w)
    promised = windows if find_policy(config_of(policy, w)).cuts_prompts else (None,) * len(windows)
    tight = {"windows": windows, "num_blocks": blocks_held(120, promised, 4) + 4}
    _, _, requests = run(policy, w | tight)
    assert [r.output for r in requests] == [r.output for r in expected]


def test_drafts_that_were_right_leave_their_blocks_to_the_next_tokens() -> None:
    """A run of accepted tokens passes a window, and the cache holds no more than the request is promised."""
    w = {**WORKLOAD, "windows": (5,), "num_blocks": 2, "block_size": 16, "max_len": 50, "stages": 1, "batch": 1}
    for seed in range(5):
        more = {"requests": [(1, 49, 0.0, True)], "drafts": 20, "extra_depth": 0, "chunk": 1, "seed": seed}
        check_run(*run("sarathi", w | more))


def test_prompts_that_left_shared_blocks_behind_go_on() -> None:
    """Blocks that others share do not come back, so that all prompts may lack some: the newest one is preempted."""
    lengths = (200, 60, 200, 100, 105, 30, 30, 100, 100, 30, 200, 105, 100)
    w = {
        **WORKLOAD,
        "windows": (12, 12),
        "num_blocks": 128,
        "block_size": 1,
        "prefix_caching": True,
        "alike": 100,
        "batch": 16,
        "stages": 1,
        "chunk": 4,
        "max_len": 220,
        "order": "relative_slack",
        "requests": [(length, 2, 0.001 * i, True) for i, length in enumerate(lengths)],
    }
    coordinator, pipeline, requests = run("sarathi", w)
    check_run(coordinator, pipeline, requests)
    assert sum(r.preemptions for r in requests) > 0


class Served:
    """A coordinator over a pool with windows, whose pipeline checks each key."""

    def __init__(self, windows: Windows, num_blocks: int) -> None:
        self.pool = WindowedPool(num_blocks, 4, 16, windows=windows, prefix_caching=True)
        self.pipeline = WindowedPipeline(1, 1, num_blocks, 4, lambda micro_batch, stage: 0.01, windows=windows)
        limits = Limits(4, Depth.fixed(1))
        self.coordinator = Coordinator(
            self.pipeline, make_scheduler(SarathiConfig(chunk=16, tile=1), limits, self.pool)
        )
        self.count = 0

    def serve(self, prompt: list[int], max_tokens: int = 2) -> int:
        """Return how many tokens of the prompt were found in the cache."""
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = Request(self.count, prompt, params, max_model_len=1000)
        self.count += 1
        self.coordinator.add(request)
        while self.coordinator.has_work:
            self.coordinator.step(self.pipeline.now_s + 1.0)
        assert self.pool.num_free == self.pool.num_blocks
        return request.record.cached_tokens


def test_a_prefix_is_as_long_as_full_attention_and_the_ends_of_windows_are_cached() -> None:
    prompt = list(range(60))
    served = Served((None, 9), 100)
    assert [served.serve(prompt), served.serve(prompt), served.serve([*prompt[:37], 7])] == [0, 56, 36]
    cache, hashes = served.pool.cache, hashes_of(prompt)
    assert cache is not None

    def forget(number: int, group: bytes) -> None:
        block = cache.block_of(hashes[number] + group)
        assert block is not None
        cache.forget([block])

    forget(12, b"\1")  # the windows that end at blocks 13 and 14 reach it
    assert served.serve(prompt) == 48
    forget(2, b"\1")
    assert served.serve(prompt) == 56, "no window reaches so far back"
    forget(5, b"")
    assert served.serve(prompt) == 20, "full attention does"


@pytest.mark.parametrize("window", [5, 8, 40])
def test_a_long_prompt_runs_in_the_blocks_of_its_window(window: int) -> None:
    served = Served((window,), blocks_held(500, (window,), 4))
    assert served.serve(list(range(400)), max_tokens=100) == 0
    assert served.pool.num_blocks < 500 // 4
    with_full = Served((None, window), blocks_held(500, (None, window), 4))
    assert with_full.serve(list(range(400)), max_tokens=100) == 0
