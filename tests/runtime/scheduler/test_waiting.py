"""Orders in which a waiting prompt may overtake one that is partly dispatched: by relative slack, and by priority."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.conf.policies import Depth, SarathiConfig
from gapless.conf.sampling import SamplingParams
from gapless.runtime.core.block_pool import BlockPool
from gapless.runtime.core.request import Request
from gapless.runtime.scheduler import Limits, Scheduler
from gapless.runtime.scheduler.policies import make_scheduler
from tests.support.tiers import examples

CHUNK = 64


def make() -> Scheduler:
    config = SarathiConfig(chunk=CHUNK, order="relative_slack")
    return make_scheduler(config, Limits(64, Depth.fixed(1), 1, 1), BlockPool(10_000, 16, 128))


def request(number: int, length: int) -> Request:
    return Request(number, b"\0" * length, SamplingParams(max_tokens=1))


def test_a_short_prompt_goes_before_a_long_one_that_is_partly_dispatched() -> None:
    scheduler = make()
    scheduler.add(request(0, 20 * CHUNK))
    for _ in range(3):
        assert scheduler.next_batch()
    scheduler.add(request(1, CHUNK))
    taken = [batch.chunks[0].request.id for _ in range(4) if (batch := scheduler.next_batch())]
    assert taken == [0, 1, 0, 0]


@settings(max_examples=examples(50))
@given(st.lists(st.tuples(st.integers(1, 500), st.integers(0, 5)), min_size=1, max_size=30))
def test_each_prompt_is_dispatched_once_and_equal_lengths_keep_their_order(arrivals: list[tuple[int, int]]) -> None:
    scheduler, ends, requests = make(), list[int](), list[Request]()

    def fill() -> None:
        batch = scheduler.next_batch()
        if batch is not None:
            ends.extend(chunk.request.id for chunk in batch.chunks if chunk.ends_prefill)

    for number, (length, rounds) in enumerate(arrivals):
        requests.append(request(number, length))
        scheduler.add(requests[-1])
        for _ in range(rounds):
            fill()
    while scheduler.backlog:
        fill()
    assert sorted(ends) == list(range(len(arrivals)))
    place = {number: i for i, number in enumerate(ends)}
    for earlier in requests:
        for later in requests[earlier.id + 1 :]:
            if later.prompt_len == earlier.prompt_len:
                assert place[earlier.id] < place[later.id]


def takers(scheduler: Scheduler, count: int) -> list[int]:
    """Return the requests whose chunks the next micro-batches take."""
    return [batch.chunks[0].request.id for _ in range(count) if (batch := scheduler.next_batch())]


def test_urgency_counts_tokens_and_not_chunks() -> None:
    scheduler = make()
    scheduler.add(request(0, 20 * CHUNK))
    assert takers(scheduler, 2) == [0, 0]
    scheduler.add(request(1, 10 * CHUNK))
    for number in range(2, 12):
        scheduler.add(request(number, 1))
    assert takers(scheduler, 11) == [0, *range(2, 12)]
    assert takers(scheduler, 2) == [0, 1], "ten tokens more make half as long a prompt no more urgent than a chunk does"


def test_of_equally_urgent_prompts_the_one_that_has_begun_goes_on_and_then_the_first() -> None:
    scheduler = make()
    for number, length in enumerate((20, 1, 5)):
        scheduler.add(request(number, length * CHUNK))
    assert takers(scheduler, 1) == [0], "nobody has waited yet"
    scheduler = make()
    scheduler.add(request(0, 20 * CHUNK))
    assert takers(scheduler, 1) == [0]
    scheduler.add(request(1, 10 * CHUNK))
    assert takers(scheduler, 3) == [0, 0, 1], "after the second chunk both have waited for a tenth of their length"


def test_only_a_lower_priority_overtakes() -> None:
    config = SarathiConfig(chunk=CHUNK, order="priority")
    scheduler = make_scheduler(config, Limits(64, Depth.fixed(1), 1, 1), BlockPool(10_000, 16, 128))
    for number, priority in ((0, 1), (1, 1), (2, 0)):
        prompt = b"\0" * (3 * CHUNK)
        scheduler.add(Request(number, prompt, SamplingParams(max_tokens=1), priority=priority))
        assert takers(scheduler, 1) == [2 if number == 2 else 0]
    assert takers(scheduler, 6) == [2, 2, 0, 1, 1, 1]
