"""A request is sent when it arrives, in a closed loop once its client has its answer and has thought."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.conf.errors import ConfigError
from gapless.conf.workloads import FixedConfig, WorkloadConfig
from gapless.models.tokenizer import ByteTokenizer
from gapless.runtime.core.work_item import WorkItem
from gapless.runtime.engine.clients import Clients
from gapless.runtime.simulation.workload import Workload, make_workload
from tests.support.closed_loops import loop
from tests.support.tiers import examples


def make(config: WorkloadConfig) -> Workload:
    return make_workload(config, vocab_size=300, context=1 << 20, tokenizer=ByteTokenizer(300))


def served(clients: Clients, seconds: float) -> list[tuple[float, float]]:
    """Send all, each answered after so long; when each was sent and answered."""
    found: list[tuple[float, float]] = []
    unanswered: list[float] = []
    while (due := clients.due) < math.inf or not clients.are_done:
        if unanswered and unanswered[0] <= due:
            clients.answered(unanswered.pop(0))
            continue
        clients.take()
        found.append((due, due + seconds))
        unanswered.append(due + seconds)
    return found


@settings(max_examples=examples(60))
@given(
    st.lists(st.floats(0, 5), max_size=20),
    st.integers(1, 4),
    st.floats(0, 2),
    st.none() | st.floats(0.1, 20),
    st.floats(0.1, 3),
)
def test_a_client_thinks_between_an_answer_and_its_next_request(
    gaps: list[float], most: int, think_s: float, duration_s: float | None, seconds: float
) -> None:
    items = [WorkItem(b"\0", 1, at) for at in np.cumsum([0.0, *gaps]).tolist()]
    sent = served(Clients(items, loop(most, think_ms=1e3 * think_s, duration_s=duration_s), 7.0), seconds)
    end = math.inf if duration_s is None else 7.0 + duration_s
    assert all(at < end for at, _ in sent)
    for number, (at, _) in enumerate(sent):
        busy = [answer + think_s for _, answer in sent[:number] if answer + think_s > at + 1e-9]
        assert len(busy) < most
        answers = [answer + think_s for _, answer in sent[:number]]
        assert at == pytest.approx(7.0 + items[number].arrival) or any(at == pytest.approx(a) for a in answers)
    if len(sent) < len(items):  # the next would have been sent too late
        free = sorted(answer + think_s for _, answer in sent)[-most:][0] if len(sent) >= most else 0.0
        assert max(7.0 + items[len(sent)].arrival, free) >= end - 1e-9


def test_a_request_is_at_the_engine_after_its_way_there() -> None:
    items = [WorkItem(b"\0" * 10, 1, 0.0), WorkItem(b"\0" * 30, 1, 0.0)]
    clients = Clients(items, loop(1, duration_s=2.5), 7.0, front=(0.25, 0.01))
    assert clients.due == pytest.approx(7.0 + 0.35)
    assert clients.to_engine(clients.take()) == pytest.approx(0.35)
    clients.answered(9.0)
    assert clients.due == pytest.approx(9.0 + 0.55), "it is sent in time, though it comes later"


def test_requests_repeat_prompts_with_their_lengths() -> None:
    workload = make(FixedConfig(num_prompts=7, distinct_prompts=3, input_len=40, output_len=9, range_ratio=0.5))
    prompts = [list(item.prompt) for item in workload]
    assert prompts == [prompts[number % 3] for number in range(7)]
    assert len({tuple(prompt) for prompt in prompts}) == 3
    begins = [item.prefix for item in workload.without_prompts()]
    hashes = [begin.block_hashes(len(prompt), 4) for begin, prompt in zip(begins, prompts, strict=True) if begin]
    assert [hashes.index(each) for each in hashes] == [0, 1, 2, 0, 1, 2, 0]
    assert [len(each) for each in hashes] == [len(prompt) // 4 for prompt in prompts]


def test_what_warms_up_comes_before_and_does_not_count() -> None:
    whole = make(FixedConfig(num_prompts=7, request_rate=2.0, range_ratio=0.5))
    workload = make(FixedConfig(num_prompts=5, warmup_requests=2, request_rate=2.0, range_ratio=0.5))
    assert workload.warmup is not None
    assert (len(workload.warmup), len(workload)) == (2, 5)
    assert [list(item.prompt) for item in (*workload.warmup, *workload)] == [list(item.prompt) for item in whole]
    assert workload.arrivals == pytest.approx(whole.arrivals[2:] - whole.arrivals[2])


def test_a_duration_takes_as_many_requests_as_come_in_it() -> None:
    workload = make(FixedConfig(duration_s=50.0, request_rate=20.0))
    assert len(workload) == pytest.approx(1000, rel=0.15)
    assert workload.arrivals[-1] < 50.0
    assert all(a <= b for a, b in pairwise(workload.arrivals))
    assert len(make(FixedConfig(duration_s=1.0, max_concurrency=3))) == 1_000_000
    assert len(make(FixedConfig(duration_s=1.0))) == 100, "all at once"


def test_only_a_closed_loop_thinks() -> None:
    with pytest.raises(ConfigError, match=r"^workload.think_ms=5.0: must be 0 without max_concurrency$"):
        FixedConfig(think_ms=5.0)
