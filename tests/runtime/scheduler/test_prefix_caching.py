"""What the prefix cache makes of a run: fewer chunks, the same outputs."""

from __future__ import annotations

from typing import Any

import pytest

from gapless.conf.policies import Depth, SarathiConfig
from gapless.conf.sampling import SamplingParams
from gapless.runtime.analysis.ledger.ledger import Ledger
from gapless.runtime.core.block_pool import BlockPool
from gapless.runtime.core.request import Request
from gapless.runtime.engine.coordinator import Coordinator
from gapless.runtime.scheduler import Limits
from gapless.runtime.scheduler.policies import POLICIES, make_scheduler
from tests.runtime.scheduler.test_schedulers import WORKLOAD, run
from tests.support.virtual_pipeline import VirtualPipeline

BLOCK = 16


class Served:
    """A coordinator over virtual stages, and the requests that it has had."""

    def __init__(self, num_blocks: int = 64, batch: int = 4) -> None:
        self.pipeline = VirtualPipeline(2, 2, num_blocks, BLOCK, lambda micro_batch, stage: 0.01)
        self.pool = BlockPool(num_blocks, BLOCK, 16, prefix_caching=True)
        scheduler = make_scheduler(SarathiConfig(chunk=32), Limits(batch, Depth.fixed(2), 1, 2), self.pool)
        self.coordinator = Coordinator(self.pipeline, scheduler)
        self.count = 0

    def add(self, prompt: list[int], max_tokens: int = 4, **further: Any) -> Request:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = Request(self.count, prompt, params, arrival=self.pipeline.now_s, max_model_len=1000, **further)
        self.count += 1
        self.coordinator.add(request)
        return request

    def finish(self) -> None:
        while self.coordinator.has_work:
            self.coordinator.step(self.pipeline.now_s + 1.0)
        assert self.pool.num_free == self.pool.num_blocks
        assert self.coordinator.scheduler.backlog == 0

    def chunks(self, request: Request) -> list[tuple[int, int]]:
        """Start and length of each of the request's chunks."""
        found = [c for m in self.coordinator.record.micro_batches for c in m.chunks if c.request == request.id]
        return [(c.start, c.tokens) for c in found]


PROMPT = list(range(100))


def test_a_prompt_that_came_before_is_not_computed_again() -> None:
    served = Served()
    first = served.add(PROMPT)
    served.finish()
    second, longer = served.add(PROMPT), served.add([*PROMPT[:50], *range(500, 550)])
    served.finish()
    assert served.chunks(first)[0] == (0, 32)
    assert served.chunks(second) == [(96, 4)]
    assert served.chunks(longer)[0][0] == 48
    assert [r.record.cached_tokens for r in (first, second, longer)] == [0, 96, 48]
    assert served.pool.cache is not None
    assert (served.pool.cache.queries, served.pool.cache.hits) == (300, 144)


def test_the_last_token_of_a_prompt_is_computed_in_any_case() -> None:
    served = Served()
    for _ in range(2):
        served.add(PROMPT[: 4 * BLOCK])
        served.finish()
    assert served.coordinator.record.requests[1].cached_tokens == 3 * BLOCK


def test_requests_share_blocks_that_are_in_flight() -> None:
    served = Served()
    a, b = served.add(PROMPT), served.add(PROMPT)
    most = 0
    while served.coordinator.has_work:
        served.coordinator.step(served.pipeline.now_s + 1.0)
        most = max(most, served.pool.num_used)
    assert b.record.cached_tokens == 96
    assert a.record.token_times[0] < b.record.token_times[0]
    assert most == 7 + 1, "six full blocks are shared, each has a last one"


def test_the_next_turn_of_a_chat_begins_with_the_output_of_the_last() -> None:
    served = Served()
    first = served.add(PROMPT, max_tokens=40)
    served.finish()
    second = served.add([*PROMPT, *first.output, *range(700, 720)])
    served.finish()
    assert second.record.cached_tokens == (100 + 39) // BLOCK * BLOCK, "the last token was never computed"


def test_another_salt_has_nothing_of_it() -> None:
    served = Served()
    for salt, expected in (("a", 0), ("b", 0), ("a", 96), ("", 0)):
        request = served.add(PROMPT, cache_salt=salt)
        served.finish()
        assert request.record.cached_tokens == expected


def test_a_preempted_request_finds_what_it_had_computed() -> None:
    served = Served(num_blocks=14)
    old, new = served.add(list(range(90)), max_tokens=60), served.add(list(range(200, 290)), max_tokens=60)
    served.finish()
    assert old.preemptions == 0
    assert new.preemptions > 0
    assert new.record.cached_tokens == 0
    restarts = [start for start, _ in served.chunks(new) if start > 90 or start % 32]
    assert restarts, "it went on with what was left of its blocks"
    assert old.num_output == new.num_output == 60


def test_what_a_broken_model_computed_is_not_shared() -> None:
    served = Served()
    bad = served.add(PROMPT)
    scheduler = served.coordinator.scheduler
    while bad.num_output < 1:
        served.coordinator.step(served.pipeline.now_s + 1.0)
    scheduler.finish(bad, "error")  # as on a token whose logits are not finite
    served.finish()
    good = served.add(PROMPT)
    served.finish()
    assert good.record.cached_tokens == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_outputs_are_those_without_the_cache_and_chunks_are_fewer(policy: str) -> None:
    w = {
        **WORKLOAD,
        "num_blocks": 70,
        "batch": 3,
        "chunk": 24,
        "tile": 4,
        "seed": 3,
        "alike": 50,
        "requests": [(60 + 5 * i, 20, 0.2 * i, True) for i in range(8)],
    }
    without, _, expected = run(policy, w)
    coordinator, _, requests = run(policy, {**w, "prefix_caching": True})
    assert [r.output for r in requests] == [r.output for r in expected]
    cached = sum(r.cached_tokens for r in coordinator.record.requests)
    assert cached >= 4 * 48
    computed = [sum(c.tokens for m in each.record.micro_batches for c in m.chunks) for each in (coordinator, without)]
    assert computed[0] <= computed[1] - cached
    Ledger(coordinator.record).check()
