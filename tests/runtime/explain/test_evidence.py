"""The numbers that show a root, from runs made by hand."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from gapless.conf.schema import SimulateConfig
from gapless.launch.compose import compose_one
from gapless.runtime.core.request_record import RequestRecord
from gapless.runtime.core.run_record import (
    DecodesRecord,
    FaultRecord,
    MicroBatchRecord,
    RunRecord,
    SegmentRecord,
    Wait,
)
from gapless.runtime.cost.stage_costs import MicroBatchShape
from gapless.runtime.explain.arrivals import clients_of, overload_of
from gapless.runtime.explain.compute_losses import compute_losses
from gapless.runtime.explain.evidence import evidence_of, of_experts, while_in_flight
from gapless.runtime.explain.hops import Hop, hops_of
from gapless.runtime.explain.known_costs import known_of
from gapless.runtime.explain.roots import Root
from gapless.runtime.explain.stage_balance import balance_of
from gapless.runtime.ledger.causes import Cause
from gapless.runtime.ledger.ledger import Ledger
from gapless.runtime.simulation.setting import make_setting
from tests.support.hand_made import span


def micro_batch(number: int, *waits: Wait, running: int = 0, waiting: int = 0, tokens: int = 8) -> MicroBatchRecord:
    chunks = [SegmentRecord(number, 0, tokens)]
    return MicroBatchRecord(
        number, 0.0, chunks, DecodesRecord.at(), list(waits), num_waiting=waiting, num_running=running
    )


def test_a_hop_is_timed_only_where_the_next_stage_was_free() -> None:
    """Of four micro-batches the first and the last find stage 1 free; the others came while it computed."""
    record = RunRecord(2, 10, [micro_batch(n, tokens=8 * (n + 1)) for n in range(4)])
    record.spans = [span(n, 0, n, n + 1) for n in range(3)] + [span(3, 0, 8, 9)]
    record.spans += [span(0, 1, 1.5, 5), span(1, 1, 5, 6), span(2, 1, 6, 7), span(3, 1, 10.5, 11)]
    (hop,) = hops_of(Ledger(record))
    assert hop == Hop(0, waited=2.0, median=1.0, tokens=20.0, tokens_per_s=20.0, total=4.0)


def test_medians_of_what_is_in_flight_are_by_time() -> None:
    waits = [Wait(1.0, 2.0, "in_flight"), Wait(3.0, 4.0, "in_flight"), Wait(5.0, 10.0, "in_flight")]
    counts = [(0, 0), (9, 1), (5, 7), (1, 3)]
    record = RunRecord(1, 10)
    for number, (wait, (running, waiting)) in enumerate(zip([None, *waits], counts, strict=True)):
        held = () if wait is None else (wait,)
        record.micro_batches.append(micro_batch(number, *held, running=running, waiting=waiting))
        begin = 0.0 if wait is None else wait.end
        record.spans.append(span(number, 0, begin, begin + 1))
    assert while_in_flight(Ledger(record)) == (1.0, 3.0)
    assert while_in_flight(Ledger(RunRecord(1, 10))) == (0.0, 0.0)


def lockstep(seconds: list[list[float]]) -> RunRecord:
    """Run two stages that take these seconds [stages, N]: in each round stage 1 computes what stage 0 did before."""
    count = len(seconds[0])
    record = RunRecord(2, 10, [micro_batch(n) for n in range(count)])
    now = 0.0
    for number in range(count + 1):
        longest = 0.0
        for stage, at in ((0, number), (1, number - 1)):
            if 0 <= at < count:
                record.spans.append(span(at, stage, now, now + seconds[stage][at]))
                longest = max(longest, seconds[stage][at])
        now += longest
    return record


def test_equal_stages_wait_for_what_micro_batches_hold() -> None:
    seconds = [4.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 9.0]
    balance = balance_of(Ledger(lockstep([seconds, seconds])), [])
    assert balance is not None
    assert balance.content.tolist() == [3.0, 8.0]  # stage 1 begins a round later, and so ends with a long one
    assert balance.usual.tolist() == [sum(seconds)] * 2
    assert balance.uneven.sum() == balance.slow.sum() == balance.chance.sum() == 0.0


def test_what_is_long_on_one_stage_alone_is_chance() -> None:
    seconds = [1.0] * 12
    balance = balance_of(Ledger(lockstep([seconds, [*seconds[:4], 3.0, *seconds[:4], 3.0, *seconds[:2]]])), [])
    assert balance is not None
    assert balance.chance == pytest.approx([4.0, 0.0])
    assert balance.usual == pytest.approx([12.0, 12.0])
    assert balance.content == pytest.approx([0.0, 0.0])


def test_a_rate_is_of_the_times_between_arrivals() -> None:
    record = RunRecord(1, 10, [micro_batch(0)], [span(0, 0, 0, 1)])
    record.requests = [RequestRecord(n, 8, arrival) for n, arrival in enumerate((4.0, 0.0, 1.0))]
    stage, found = evidence_of(Root.FEW_REQUESTS, Cause.STARVED_NO_REQUEST, record, Ledger(record))
    assert stage is None
    assert found["requests_per_s"] == 2 / 4


@pytest.mark.parametrize(("up", "longest"), [(3.0, 2.5), (None, 7.5)])
def test_a_fault_that_was_never_repaired_lasts_to_the_end(up: float | None, longest: float) -> None:
    record = RunRecord(1, 10, [micro_batch(0), micro_batch(1)], [span(0, 0, 0, 1), span(1, 0, 7, 8)])
    record.faults = [FaultRecord(1, "rank", "a rank died", since=0.5, detected=0.7, up=up)]
    _, found = evidence_of(Root.RECOVERY, Cause.RECOVERY, record, Ledger(record))
    assert found == {"faults": 1, "longest_s": longest}


@pytest.mark.parametrize(("load", "is_named"), [(1.0, False), (1.6, False), (2.0, True), (3.0, True)])
def test_routing_is_named_where_a_slow_stage_s_is_clearly_less_even(load: float, is_named: bool) -> None:
    """Stage 0 has loads of 1.4 and 1.6; about as much on stage 1 does not explain its time."""
    record = RunRecord(2, 10, [micro_batch(0), micro_batch(1)])
    for number in (0, 1):
        even, busiest = span(number, 0, number, number + 1), span(number, 1, number + 1, number + 3)
        record.spans += [
            msgspec.structs.replace(even, expert_load=1.4 + 0.2 * number, hot_layer=0, hot_expert=5),
            msgspec.structs.replace(busiest, expert_load=load, hot_layer=3, hot_expert=7),
        ]
    named = {"expert_load": load, "expert_load_of_others": 1.5, "hot_layer": 3, "hot_expert": 7}
    assert of_experts(1, record) == (pytest.approx(named) if is_named else {})
    assert of_experts(0, replace(record, spans=[each for each in record.spans if each.stage == 0])) == {}


def asked(times: list[tuple[float, float, float]]) -> RunRecord:
    """Return a run of requests, each with its arrival and its first and last token, on one stage that is never idle."""
    record = RunRecord(1, 10, [micro_batch(0)], [span(0, 0, times[0][0], max(last for *_, last in times))])
    record.requests = [
        RequestRecord(number, 8, arrival, [first, last]) for number, (arrival, first, last) in enumerate(times)
    ]
    return record


@pytest.mark.parametrize("think", [0.0, 0.1])
def test_a_closed_loop_is_told_by_what_is_unfinished(think: float) -> None:
    """Two clients by turns, each of which asks again `think` seconds after its answer."""
    each = 1.0 + think
    loop = [(k // 2 * each + k % 2 / 4, k // 2 * each + 0.5, k // 2 * each + 1.0 + k % 2 / 4) for k in range(24)]
    assert clients_of(asked(loop)) == pytest.approx({"clients": 2, "think_s": think})
    assert clients_of(asked([(k, k + 0.5, k + 1.75 - k % 2) for k in range(24)])) == {}


def test_a_queue_that_grew_is_late_by_no_more_than_the_last_request_waited() -> None:
    """Two requests come each second and one is served, in a second: the last waits for 29.5 s, and then takes one."""
    record = asked([(k / 2, k + 0.5, k + 1.0) for k in range(60)])
    late, numbers = overload_of(record, Ledger(record))
    assert 25.0 < late <= 29.5
    assert numbers == pytest.approx({"arrived_per_s": 2.0, "served_per_s": 1.0, "unfinished": 31.0, "late_s": 30.5})
    at_once = asked([(0.0, k + 0.5, k + 1.0) for k in range(60)])
    assert overload_of(at_once, Ledger(at_once)) == (0.0, {})
    in_time = asked([(k * 1.0, k + 0.5, k + 1.0) for k in range(60)])
    assert overload_of(in_time, Ledger(in_time)) == (0.0, {})


def test_tokens_computed_again_after_a_preemption_are_its_loss() -> None:
    """A prompt of 512 is computed in two chunks, preempted, and computed again with the 8 tokens that it had got."""
    words = ["model=llama-13b", "hardware=a100-80g", "parallel.pp=1", "parallel.tp=1"]
    config = compose_one(words, SimulateConfig, "simulate")
    known = known_of(make_setting(config))
    assert known.costs.num_stages == 1
    chunks = [(0, 256), (256, 256), (0, 520)]
    record = RunRecord(1, 100)
    for number, (start, tokens) in enumerate(chunks):
        held = [SegmentRecord(0, start, tokens)]
        record.micro_batches.append(MicroBatchRecord(number, 0.0, held, DecodesRecord.at()))
        record.spans.append(span(number, 0, number, number + 1))
    record.requests = [RequestRecord(0, 512, 0.0, [2.0, 3.0], preemptions=1)]
    seconds = [known.costs.seconds(MicroBatchShape.of_record(each))[0] for each in record.micro_batches]
    losses = compute_losses(known, record, Ledger(record))
    assert losses[Root.PREEMPTION][0] == pytest.approx(3.0 * seconds[2] / sum(seconds))
    record.requests = [replace(record.requests[0], preemptions=0)]
    assert Root.PREEMPTION not in compute_losses(known, record, Ledger(record))
