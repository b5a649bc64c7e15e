"""Requests whose KV comes from another pipeline: their admission, and what a scheduler says while it waits for them."""

from __future__ import annotations

import pytest

from gapless.conf.policies import Depth, TokenBudgetConfig
from gapless.conf.sampling import SamplingParams
from gapless.runtime.core.block_pool import BlockPool
from gapless.runtime.core.request import Request
from gapless.runtime.scheduler.base import Scheduler
from gapless.runtime.scheduler.limits import Limits
from gapless.runtime.scheduler.policies import make_scheduler

BLOCK = 4


def scheduler(num_blocks: int = 20, batch: int = 4) -> Scheduler:
    limits = Limits(batch, Depth.fixed(1))
    return make_scheduler(TokenBudgetConfig(max_batched_tokens=64), limits, BlockPool(num_blocks, BLOCK))


def prefilled(number: int, prompt: int, output: int = 8) -> Request:
    """Return a request that comes with its first token."""
    request = Request(number, bytes(prompt), SamplingParams(max_tokens=output, ignore_eos=True), output=[0])
    request.prefill_target = request.num_dispatched = prompt
    return request


def test_they_decode_once_their_kv_is_there() -> None:
    policy, request = scheduler(), prefilled(0, 10)
    policy.add(request)
    assert (policy.num_waiting, policy.has_work, policy.backlog) == (1, True, 0)
    assert policy.admit_incoming() == [request]
    assert (policy.num_waiting, len(request.blocks)) == (0, 3)
    assert policy.next_batch() is None
    assert policy.blocked == "kv_transfer"
    policy.received(request)
    batch = policy.next_batch()
    assert batch is not None
    assert (batch.decodes, batch.chunks, request.num_dispatched) == ([request], [], 11)
    assert policy.next_batch() is None
    assert policy.blocked == "in_flight"


def test_first_come_first_served_as_slots_and_blocks_allow() -> None:
    policy = scheduler(num_blocks=12)
    requests = [prefilled(0, 15), prefilled(1, 15), prefilled(2, 15), prefilled(3, 3)]
    for request in requests:
        policy.add(request)
    assert policy.admit_incoming() == requests[:2], "the third leaves no block for those that run"
    assert policy.num_waiting == 2
    policy.received(requests[0])
    assert policy.next_batch() is not None
    assert policy.next_batch() is None
    assert policy.blocked == "kv_full"
    narrow = scheduler(batch=1)
    for number in (0, 1):
        narrow.add(prefilled(number, 3))
    assert len(narrow.admit_incoming()) == 1


def test_those_that_were_preempted_here_go_first() -> None:
    policy = scheduler(num_blocks=7)
    old, new = prefilled(0, 11), prefilled(1, 11)
    for request in (old, new):
        policy.add(request)
    assert policy.admit_incoming() == [old, new]
    for request in (old, new):
        policy.received(request)
    late = prefilled(2, 3)
    policy.add(late)
    for _ in range(12):
        batch = policy.next_batch()
        assert batch is not None
        policy.completed(batch)
        for request in batch.decodes:
            request.output.append(0)
        policy.resume(batch.decodes)
        if new.preemptions:
            break
    assert new.preemptions == 1
    assert policy.pool.num_free >= policy.pool.blocks_for(late.num_tokens) + len(policy.running)
    assert policy.admit_incoming() == []
    assert list(policy.running) == [old.id]


def test_one_that_is_under_way_is_not_preempted() -> None:
    policy = scheduler(num_blocks=7)
    old, under_way = prefilled(0, 11), prefilled(1, 11)
    for request in (old, under_way):
        policy.add(request)
    policy.admit_incoming()
    policy.received(old)
    for _ in range(6):
        batch = policy.next_batch()
        if batch is None:
            break
        policy.completed(batch)
        old.output.append(0)
        policy.resume([old])
    else:
        pytest.fail("it took the blocks of one whose KV is under way")
    assert policy.blocked == "kv_full"
    assert (under_way.preemptions, len(under_way.blocks)) == (0, 3)
