"""What single policies promise beyond their rules (`test_schedulers.py`), on a virtual pipeline of known times."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from gapless.conf.policies import (
    Depth,
    EqualTimeConfig,
    PrefillFirstConfig,
    SarathiConfig,
    SchedulerConfig,
    TokenThrottleConfig,
)
from gapless.conf.sampling import SamplingParams
from gapless.runtime.analysis.ledger.fleet import Fleet
from gapless.runtime.analysis.ledger.summary import summarize
from gapless.runtime.core.block_pool import BlockPool
from gapless.runtime.core.messages import MicroBatchMessage, Span
from gapless.runtime.core.micro_batch import MicroBatch
from gapless.runtime.core.request import Request
from gapless.runtime.core.run_record import Blocked, DecodesRecord, MicroBatchRecord, Wait
from gapless.runtime.engine.coordinator import Coordinator
from gapless.runtime.scheduler import Limits, Scheduler
from gapless.runtime.scheduler.learned.turnaround import Turnaround
from gapless.runtime.scheduler.policies import make_scheduler
from gapless.runtime.scheduler.policies.equal_time import EqualTime
from gapless.runtime.scheduler.policies.token_throttle import TokenThrottle
from gapless.runtime.scheduler.waiting import FairShare
from tests.support.virtual_pipeline import StageTime, VirtualPipeline

STAGES, TILE = 2, 16


def stage_time(micro_batch: MicroBatchMessage, stage: int) -> float:
    """As measured for a LLaMA of 160M parameters on a core a stage, rounded; the head on the last stage."""
    seconds = 20e-3 + 1.2e-3 * micro_batch.num_tokens + 6e-6 * sum(d.start for d in micro_batch.decodes)
    seconds += sum(0.3e-6 * c.start * len(c.tokens) + 0.2e-6 * len(c.tokens) ** 2 for c in micro_batch.chunks)
    return seconds + (0.9e-3 * len(micro_batch.decodes) if stage == STAGES - 1 else 0.0)


def make(config: SchedulerConfig, batch: int, depth: int = STAGES) -> Scheduler:
    limits = Limits(batch, Depth(min(depth, STAGES), depth), TILE, STAGES)
    return make_scheduler(config, limits, BlockPool(100_000, 16, 128))


def run(
    config: SchedulerConfig, batch: int, requests: list[tuple[int, int]], seconds: StageTime = stage_time
) -> tuple[Coordinator, dict]:
    pipeline = VirtualPipeline(STAGES, STAGES, 100_000, 16, seconds)
    coordinator = Coordinator(pipeline, make(config, batch))
    for i, (prompt, output) in enumerate(requests):
        coordinator.add(Request(i, [i % 1000] * prompt, SamplingParams(max_tokens=output, ignore_eos=True)))
    while coordinator.has_work:
        coordinator.step(pipeline.now_s + 1.0)
    return coordinator, summarize(Fleet([coordinator.record]))


def workload(count: int) -> list[tuple[int, int]]:
    """512 to 1024 tokens in all, P:D 10."""
    rng = random.Random(3)
    lengths = [rng.randint(512, 1024) for _ in range(count)]
    return [(n - round(n / 11), round(n / 11)) for n in lengths]


def test_equal_time_beats_sarathi_in_bubbles_throughput_and_p99_tbt() -> None:
    requests = workload(60)
    _, sarathi = run(SarathiConfig(chunk=192), 20, requests)
    coordinator, equal = run(EqualTimeConfig(chunk=192, iterations=None), 20, requests)
    assert equal["bubble_fraction_inner"] < 0.5 * sarathi["bubble_fraction_inner"]
    assert equal["duration"] < 0.95 * sarathi["duration"]
    assert equal["p99_itl_ms"] < sarathi["p99_itl_ms"]
    assert equal["prediction_error"]["median"] < 0.02
    assert coordinator.record.stage_weights is not None


def test_equal_time_keeps_to_a_time_that_it_is_told() -> None:
    coordinator, _ = run(EqualTimeConfig(chunk=256, target_ms=150), 16, workload(40))
    last = [s for s in coordinator.record.spans if s.stage == STAGES - 1][50:]
    seconds = sorted(s.end - s.begin for s in last)
    assert seconds[int(0.99 * len(seconds))] < 0.16
    assert seconds[len(seconds) // 2] > 0.1


def test_equal_time_leaves_no_tiny_tail() -> None:
    coordinator, _ = run(EqualTimeConfig(chunk=256), 8, [(300, 1)])
    assert [c.tokens for micro_batch in coordinator.record.micro_batches for c in micro_batch.chunks] == [150, 150]


def test_equal_time_fills_up_with_the_next_prompt() -> None:
    coordinator, _ = run(EqualTimeConfig(chunk=256), 8, [(300, 1), (300, 1), (300, 1)])
    first, second = coordinator.record.micro_batches[:2]
    assert [c.tokens for c in first.chunks] == [256]
    assert [(c.request, c.tokens) for c in second.chunks] == [(0, 44), (1, 212)]


@pytest.mark.parametrize("config", [EqualTimeConfig(chunk=64), TokenThrottleConfig()])
def test_decodes_are_dealt_evenly(config: SchedulerConfig) -> None:
    coordinator, _ = run(config, 16, [(20, 60)] * 10)
    decodes = [len(s.decodes) for s in coordinator.record.micro_batches]
    assert decodes[len(decodes) // 2 :].count(5) >= 0.9 * len(decodes) / 2


def decoding(scheduler: Scheduler, count: int) -> list[Request]:
    """Make requests that are ready for a decode, whose prompts another pipeline has prefilled."""
    requests = [Request(i, bytes(8), SamplingParams(max_tokens=50, ignore_eos=True), output=[0]) for i in range(count)]
    for each in requests:
        each.prefill_target = each.num_dispatched = each.prompt_len
        scheduler.add(each)
    assert scheduler.admit_incoming() == requests
    return requests


def test_the_remainder_of_decodes_is_dealt_round_robin() -> None:
    limits = Limits(8, Depth.fixed(3), 1, 3)
    scheduler = make_scheduler(TokenThrottleConfig(), limits, BlockPool(200, 16))
    requests = decoding(scheduler, 10)
    for each in requests[:7]:
        scheduler.received(each)
    batches = [scheduler.next_batch() for _ in range(3)]
    assert [len(batch.decodes) for batch in batches if batch] == [3, 2, 2], "without those whose KV is under way"
    assert scheduler.next_batch() is None, "a turn in which nothing was ready is none"
    for expected in (3, 2, 2):
        batch = batches.pop(0)
        assert batch is not None
        scheduler.completed(batch)
        for each in batch.decodes:
            each.output.append(0)
        scheduler.resume(batch.decodes)
        batches.append(scheduler.next_batch())
        assert batches[-1] is not None
        assert len(batches[-1].decodes) == expected


def test_what_the_queues_say_of_the_room_that_is_left() -> None:
    scheduler = make_scheduler(SarathiConfig(chunk=64), Limits(5, Depth.fixed(2)), BlockPool(20, 16))
    assert scheduler.queue_snapshot().num_admissible == 10
    for number, length in enumerate((64, 48, 32)):
        scheduler.add(request(number, length))
    for _ in range(2):
        scheduler.next_batch()
    queues = scheduler.queue_snapshot()
    assert (queues.num_running, queues.num_waiting, queues.num_prefilling, queues.backlog) == (2, 1, 0, 32)
    assert queues.num_admissible == (20 - 7 - 2) * 2 / 7, "with a block left for each running"
    assert queues.decodes_a_micro_batch == (2 + queues.num_admissible) / 2


def picked(coordinator: Coordinator) -> list[int]:
    """Return the chunks that `auto` picked, as its notes say."""
    return [int(note.split("chunk=auto: ")[1].split()[0]) for note in coordinator.record.notes]


AUTO = (SarathiConfig(chunk="auto"), EqualTimeConfig(chunk="auto", iterations=None))


@pytest.mark.parametrize("config", AUTO)
def test_auto_picks_what_saturates_a_stage_and_says_why(config: SchedulerConfig) -> None:
    coordinator, _ = run(config, 64, workload(60))
    first = coordinator.record.notes[0]
    assert f"tokens (tile {TILE}): a stage has 95.0% of its prefill speed from" in first, "many prompts wait"
    speeds = {n: n / (20e-3 + 1.2e-3 * n + 0.2e-6 * n * n) for n in range(TILE, 1025, TILE)}
    least = next(n for n, speed in speeds.items() if speed >= 0.95 * max(speeds.values()))
    assert 0.8 * least <= picked(coordinator)[0] <= 2 * least
    assert all(chunk % TILE == 0 for chunk in picked(coordinator))
    assert len(coordinator.record.notes) <= 4


@pytest.mark.parametrize("config", AUTO)
def test_auto_picks_as_soon_as_it_has_tried_the_sizes(config: SchedulerConfig) -> None:
    """A run of some dozen micro-batches has the picked chunk for most of them."""
    coordinator, _ = run(config, 64, [(2000, 20)] * 8)
    chunk = picked(coordinator)[0]
    sizes = [micro_batch.num_tokens for micro_batch in coordinator.record.micro_batches]
    first = next(n for n in range(len(sizes)) if all(size <= 1.2 * chunk for size in sizes[n:]))
    assert chunk < 0.8 * max(sizes)
    assert first <= 24


def test_auto_takes_no_more_than_decodes_need_to_ride() -> None:
    for output, balanced in ((20, 372), (100, 84)):
        coordinator, _ = run(SarathiConfig(chunk="auto"), 12, [(600, output)] * 80)
        notes = [n for n in coordinator.record.notes if "decodes, as many as can run, b x (P:D + 1) is" in n]
        assert bool(notes) == (balanced < 200)
        assert (TILE * (balanced // TILE) in picked(coordinator)) == (balanced < 200)


def test_auto_says_where_prompts_are_too_short_to_tell() -> None:
    coordinator, _ = run(SarathiConfig(chunk="auto"), 12, [(60, 5)] * 80)
    assert picked(coordinator) == [256]
    assert coordinator.record.notes[0].endswith("as far as prompts are long enough to tell")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "prompt", "output"), [(AUTO[0], 600, 200), (AUTO[1], 900, 90), (AUTO[0], 900, 90), (AUTO[1], 2500, 60)]
)
def test_auto_is_not_much_slower_than_the_best_chunk(config: SchedulerConfig, prompt: int, output: int) -> None:
    requests = [(prompt + 7 * (i % 10), output + i % 13) for i in range(150)]
    auto = run(config, 16, requests)[1]["duration"]
    fixed = [run(replace(config, chunk=chunk), 16, requests)[1]["duration"] for chunk in (64, 128, 256, 512)]
    assert auto <= min(fixed) / 0.875


def test_sizes_that_are_tried_do_not_make_the_pipeline_deeper() -> None:
    for chunk in ("auto", 256):
        scheduler = run(EqualTimeConfig(chunk=chunk), 64, [(900, 20)] * 150)[0].scheduler
        assert isinstance(scheduler, EqualTime)
        assert not scheduler._turnaround.is_long


def observed(waits: Sequence[Sequence[float]], seconds: Sequence[float], reason: Blocked = "depth_full") -> bool:
    """Return whether a turnaround `is_long`.

    Each stage takes `seconds` and idles for `waits` before, micro-batch by micro-batch of a round.
    """
    turnaround = Turnaround(len(seconds))
    at = 0.0
    for number in range(200):
        wait = waits[number % len(waits)]
        micro_batch = MicroBatchRecord(
            number, at, [], DecodesRecord.at(), [Wait(at, at + wait[0], reason)] if wait[0] else []
        )
        begin = [at + wait[s] for s in range(len(seconds))]
        ends = [b + t for b, t in zip(begin, seconds, strict=True)]
        turnaround.observe(micro_batch, [Span(number, s, at, begin[s], begin[s], e, e) for s, e in enumerate(ends)])
        at = max(ends)
    return turnaround.is_long


def test_a_long_turnaround_is_what_even_the_busiest_stage_idles() -> None:
    for lag, is_long in ((0.001, False), (0.02, True), (0.5, True)):
        assert observed([(lag, lag)], (0.1, 0.1)) == is_long, lag
    for late in (0, 1):
        round_ = [(0.04, 0.04) if slot == late else (0.0, 0.0) for slot in range(2)]
        assert observed(round_, (0.1, 0.1)), "of a round, all before one micro-batch"
    assert not observed([(0.1, 0.0)], (0.1, 0.2)), "the second stage never waits: none more in flight would help"
    assert not observed([(0.5, 0.5)], (0.1, 0.1), "in_flight"), "there was nothing to put in flight"


def test_one_more_in_flight_while_prompts_wait_and_fill() -> None:
    scheduler = make(EqualTimeConfig(), 8, depth=STAGES + 1)
    assert isinstance(scheduler, EqualTime)

    def depth() -> int:
        scheduler.next_batch()
        return scheduler.depth

    scheduler._turnaround.is_long = True
    assert depth() == STAGES, "nothing waits that would fill one more"
    scheduler.add(Request(0, [1] * 17_000, SamplingParams(max_tokens=1)))
    assert depth() == STAGES + 1
    scheduler._turnaround.is_long = False
    assert depth() == STAGES, "no stage waits for a turnaround"
    scheduler._turnaround.is_long = True
    assert depth() == STAGES + 1
    scheduler.target.typical.fullness = 0.5
    assert scheduler.depth == STAGES, "prompts do not fill what is in flight already"


@pytest.mark.slow
def test_decodes_are_not_dealt_over_more_micro_batches_where_blocks_lack() -> None:
    def mostly_fixed(micro_batch: MicroBatchMessage, stage: int) -> float:
        return 40e-3 + 0.04e-3 * micro_batch.num_tokens + (20e-3 if micro_batch.micro_batch % 2 else 0.0)

    makespans = []
    for depth in (STAGES, STAGES + 1):
        pipeline = VirtualPipeline(STAGES, depth, 400, 16, mostly_fixed)
        limits = Limits(64, Depth(STAGES, depth), TILE, STAGES)
        coordinator = Coordinator(pipeline, make_scheduler(EqualTimeConfig(), limits, BlockPool(400, 16, 128)))
        for i in range(100):
            coordinator.add(Request(i, [i] * 600, SamplingParams(max_tokens=200, ignore_eos=True)))
        while coordinator.has_work:
            coordinator.step(pipeline.now_s + 1.0)
        makespans.append(pipeline.now_s)
    assert makespans[1] <= 1.02 * makespans[0]


def test_whole_tiles_where_their_steps_are_felt() -> None:
    def stepped(micro_batch: MicroBatchMessage, stage: int) -> float:
        return 5e-3 + 20e-3 * -(-micro_batch.num_tokens // 64) + 1e-6 * sum(d.start for d in micro_batch.decodes)

    requests = workload(60)
    _, sarathi = run(SarathiConfig(chunk=128, tile=64), 20, requests, stepped)
    coordinator, equal = run(EqualTimeConfig(chunk=128, tile=64), 20, requests, stepped)
    later = coordinator.record.micro_batches[100:]
    filled = [micro_batch for micro_batch in later if micro_batch.num_waiting and micro_batch.chunks]
    assert len(filled) > 50
    assert sum(micro_batch.num_tokens % 64 == 0 for micro_batch in filled) > 0.9 * len(filled)
    assert equal["duration"] < 0.95 * sarathi["duration"]
    assert equal["prediction_error"]["median"] < 0.02


@pytest.mark.parametrize("prompt", [2 * STAGES * 128, 16 * STAGES * 128])
def test_micro_batches_are_filled_also_while_few_prompts_wait(prompt: int) -> None:
    """A round with room left over would have the next prompt wait, and other stages idle."""
    scheduler = make(EqualTimeConfig(chunk=128, tile=64), 8)
    for number, length in enumerate((prompt - 16, 16)):  # a prompt alone would be cut into equal chunks
        scheduler.add(Request(number, [1] * length, SamplingParams(max_tokens=1)))
    batches = [scheduler.next_batch() for _ in range(STAGES)]
    assert [batch.num_tokens for batch in batches if batch] == [128] * STAGES


def admitted(order: str, requests: list[Request]) -> list[int]:
    scheduler = make(SarathiConfig(chunk=1000, order=order), 1)  # type: ignore[arg-type]
    for request in requests:
        scheduler.add(request)
    seen = []
    while scheduler.num_waiting:
        request = scheduler.waiting.head()
        assert request is not None
        seen.append(request.id)
        assert scheduler.admit() is request
        scheduler.finish(request, "abort")
    return seen


def request(id: int, prompt: int, user: str = "", deadline: float | None = None) -> Request:
    return Request(id, [1] * prompt, SamplingParams(max_tokens=10), user=user, deadline=deadline)


def test_orders() -> None:
    def some() -> list[Request]:
        return [request(0, 50, deadline=9.0), request(1, 20), request(2, 30, deadline=3.0), request(3, 20)]

    assert admitted("fcfs", some()) == [0, 1, 2, 3]
    assert admitted("shortest_prompt", some()) == [1, 3, 2, 0]
    assert admitted("deadline", some()) == [2, 0, 1, 3]


def test_fair_share_takes_turns_over_users_by_tokens() -> None:
    many = [request(i, 90, "many") for i in range(6)]
    late = [request(6, 90, "few"), request(7, 190, "large"), request(8, 90, "few")]
    assert admitted("fair_share", many + late) == [0, 6, 7, 1, 8, 2, 3, 4, 5]


def test_an_idle_user_saves_nothing_up() -> None:
    scheduler = make(SarathiConfig(order="fair_share"), 1)
    for i in range(4):
        scheduler.add(request(i, 90, "busy"))
    for _ in range(3):
        taken = scheduler.admit()
        assert taken is not None
        scheduler.finish(taken, "abort")
    scheduler.add(request(4, 90, "new"))
    scheduler.add(request(5, 90, "new"))
    order = []
    while taken := scheduler.admit():
        order.append(taken.id)
        scheduler.finish(taken, "abort")
    assert order == [4, 3, 5]


def test_fair_share_counts_the_longest_output_too() -> None:
    def asks(id: int, user: str, output: int) -> Request:
        return Request(id, [1] * 10, SamplingParams(max_tokens=output), user=user)

    long, short = [asks(i, "long", 90) for i in range(3)], [asks(i, "short", 15) for i in range(3, 7)]
    assert admitted("fair_share", long + short) == [0, 3, 4, 5, 6, 1, 2]


def test_virtual_time_does_not_go_back_with_a_request_that_was_preempted() -> None:
    queue = FairShare()
    requests = [request(i, 90, "busy") for i in range(3)]
    for each in requests:
        queue.push(each)
    for each in requests:
        assert queue.head() is each
        queue.pop()
    queue.push(requests[0])  # admitted again after the others
    queue.pop()
    assert queue.key(request(3, 90, "new")) == queue.key(request(4, 90, "newer")) == 200.0


def test_of_very_many_users_only_those_who_are_idle_are_forgotten() -> None:
    queue = FairShare()
    for number in range(10_000):
        queue.key(request(number, 90, f"user {number}"))
    assert [queue.key(request(number, 990, "busy")) for number in (10_000, 10_001)] == [0.0, 1000.0]
    idle = request(10_002, 190, "idle")
    idle.order_key = 150.0
    queue.push(idle)
    queue.pop()
    assert queue.key(request(10_003, 90, "busy")) == 2000.0
    assert queue.key(request(10_004, 90, "user 7")) == 150.0


@pytest.mark.parametrize("order", ["fcfs", "relative_slack"])
def test_the_next_is_the_first_that_was_not_aborted(order: str) -> None:
    scheduler = make(SarathiConfig(chunk=1000, order=order), 1)  # type: ignore[arg-type]
    requests = [request(number, 20) for number in range(4)]
    for each in requests:
        scheduler.add(each)
    for each in requests[:3]:
        scheduler.finish(each, "abort")
    assert scheduler.waiting.head() is requests[3]
    assert scheduler.num_waiting == 1
    scheduler.finish(requests[3], "abort")
    assert scheduler.waiting.head() is None


def test_prompts_that_fill_a_batch_exactly_enter_together() -> None:
    scheduler = make(PrefillFirstConfig(max_prefill_tokens=100), 4)
    for number, length in enumerate((60, 40, 1)):
        scheduler.add(request(number, length))
    batch = scheduler.next_batch()
    assert batch is not None
    assert [chunk.length for chunk in batch.chunks] == [60, 40]


@pytest.mark.parametrize(
    ("backlog", "used", "expected"),
    [
        (1001, 0, 251),  # rounded up
        (100, 0, 64),  # the least
        (10_000, 0, 2000),  # an empty cache gives the most
        (10_000, 45, 1000),  # half of what lies above the reserve
        (10_000, 95, 64),  # nothing above the reserve
    ],
)
def test_prompt_tokens_follow_the_backlog_and_the_free_cache(backlog: int, used: int, expected: int) -> None:
    config = TokenThrottleConfig(iterations=4, max_prefill_tokens=2000, min_prefill_tokens=64, kv_reserve=0.1)
    pool = BlockPool(100, 16)
    scheduler = make_scheduler(config, Limits(4, Depth.fixed(1)), pool)
    assert isinstance(scheduler, TokenThrottle)
    pool.grow([], 16 * used)
    scheduler.backlog = backlog
    assert scheduler.prefill_budget == expected


def test_a_chunk_is_cut_to_the_tile_where_that_costs_little() -> None:
    scheduler = make(EqualTimeConfig(chunk=512), 8)
    assert isinstance(scheduler, EqualTime)
    for number in range(2):
        scheduler.add(request(number, 1000))
    prompt, batch = scheduler.next_prompt(), MicroBatch()
    assert prompt is not None
    for seconds, expected in ((500.0, 496), (110.0, 110), (328.0, 320), (1000.0, 1000)):  # a token stands for a second
        assert scheduler._short_chunk_length(batch, prompt, seconds) == expected


def test_a_micro_batch_of_nothing_is_none() -> None:
    for depth in (1, 3):
        scheduler = make(EqualTimeConfig(), 4, depth)
        assert scheduler.next_batch() is None
        assert scheduler.blocked == "no_request"
        assert not MicroBatch()
