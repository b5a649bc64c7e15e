"""Simulated faults: what holds under any, and what one costs. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.conf.policies import SarathiConfig
from gapless.conf.simulation import FaultsConfig
from gapless.runtime.analysis.ledger.causes import Cause
from gapless.runtime.analysis.ledger.fleet import Fleet
from gapless.runtime.analysis.ledger.ledger import Ledger
from gapless.runtime.analysis.ledger.running_totals import RunningTotals
from gapless.runtime.analysis.ledger.summary import summarize
from gapless.runtime.core.run_record import RunRecord
from gapless.runtime.pipeline.protocol import PipelineError
from gapless.runtime.scheduler.policies import POLICIES
from gapless.runtime.simulation.cost.stage_costs import MicroBatchShape
from gapless.runtime.simulation.pipeline import replicas as simulation
from gapless.runtime.simulation.pipeline.faults import RankFault, draw_faults
from gapless.runtime.simulation.pipeline.replicas import ROUTERS, Replica
from gapless.runtime.simulation.pipeline.simulated_pipeline import Disturbance
from tests.runtime.simulation.pipeline.test_simulation import TakesNothing, told
from tests.support.closed_loops import loop
from tests.support.simulated_parts import AuditedFaulty, Device, items, make_replica, run
from tests.support.tiers import examples

TIMES = FaultsConfig(
    detect_process_s=0.03,
    detect_hang_s=0.4,
    stop_s=0.02,
    start_s=0.5,
    start_with_spare_s=0.1,
    rendezvous_s=0.05,
    weights_s=0.2,
)
REPAIR_S = 0.02 + 0.5 + 0.05 + 0.2


def faults_of(num_stages: int) -> st.SearchStrategy[list[RankFault]]:
    each = st.builds(RankFault, st.floats(0, 4), st.integers(0, num_stages - 1), st.booleans())
    return st.lists(each, max_size=6).map(lambda faults: sorted(faults, key=lambda fault: fault.at))


@st.composite
def fleets(draw: st.DrawFn) -> dict[str, Any]:
    stages, replicas = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    requests = st.tuples(st.integers(1, 70), st.integers(1, 50), st.floats(0, 2))
    return {
        "router": draw(st.sampled_from(sorted(ROUTERS))),
        "most": draw(st.none() | st.integers(1, 6)),
        "requests": draw(st.lists(requests, min_size=1, max_size=12)),
        "jitter": draw(st.sampled_from([0.0, 0.3])),
        "faults": [draw(faults_of(stages)) for _ in range(replicas)],
        "replica": {
            "policy": draw(st.sampled_from(POLICIES)),
            "layers": draw(st.lists(st.integers(1, 3), min_size=stages, max_size=stages)),
            "devices": [Device(draw(st.sampled_from([1.0, 3.0]))) for _ in range(stages)],
            "batch": draw(st.integers(1, 5)),
            "depth": draw(st.none() | st.integers(1, 6)),
            "num_blocks": draw(st.integers(30, 90)),
            "overlap_sends": draw(st.booleans()),
            "dispatch_s": draw(st.sampled_from([0.0, 0.002])),
            "result_s": draw(st.sampled_from([0.0, 0.003])),
            "times": TIMES,
            "spares": draw(st.integers(0, 2)),
        },
    }


def ran(fleet: dict[str, Any], faults: list[list[RankFault]] | None = None) -> list[Replica]:
    replicas = [
        make_replica(disturbance=Disturbance(fleet["jitter"], seed=number), faults=of_it, **fleet["replica"])
        for number, of_it in enumerate(fleet["faults"] if faults is None else faults)
    ]
    ended = run(replicas, items(*fleet["requests"]), router=fleet["router"], workload=loop(fleet["most"]))
    assert ended == len(fleet["requests"])
    return replicas


@settings(max_examples=examples(60))
@given(fleets())
def test_every_request_gets_its_tokens_and_time_is_conserved(fleet: dict[str, Any]) -> None:
    replicas, work = ran(fleet), items(*fleet["requests"])
    served = sorted((entry for replica in replicas for entry in replica.record.requests), key=lambda e: e.request)
    assert [(e.request, e.prompt_tokens, e.output_tokens, e.finish_reason) for e in served] == [
        (number, len(item.prompt), item.output_len, "length") for number, item in enumerate(work)
    ]
    for replica, faults in zip(replicas, fleet["faults"], strict=True):
        pipeline, record = replica.pipeline, replica.record
        assert isinstance(pipeline, AuditedFaulty)
        assert pipeline.most <= pipeline.depth
        assert replica.coordinator.scheduler.pool.num_free == pipeline.num_blocks
        assert not replica.coordinator.has_work
        Ledger(record).check()
        check_faults(record, faults)
    Fleet([replica.record for replica in replicas]).check()


def check_faults(record: RunRecord, faults: list[RankFault]) -> None:
    """Check that a stage whose rank has failed computes nothing until it is replaced.

    Each repair is followed to its end or to the next fault.
    """
    assert [fault.epoch for fault in record.faults] == list(range(1, len(record.faults) + 1))
    for fault, after in pairwise(record.faults):
        assert fault.up is not None
        assert fault.up <= after.since
    for failed in faults:
        noticed = next((fault for fault in record.faults if fault.detected >= failed.at), None)
        if noticed is None:
            continue
        up = noticed.up or np.inf
        assert not noticed.ranks or failed.rank in noticed.ranks
        assert not [s for s in record.spans if s.stage == failed.rank and failed.at < s.end and s.begin < up]


@settings(max_examples=examples(20))
@given(fleets())
def test_faults_that_are_given_again_give_the_same_run(fleet: dict[str, Any]) -> None:
    first, again = ran(fleet), ran(fleet)
    assert [told(r.record) for r in first] == [told(r.record) for r in again]
    assert [r.record.faults for r in first] == [r.record.faults for r in again]


@settings(max_examples=examples(20))
@given(fleets())
def test_without_faults_it_is_the_pipeline_that_has_none(fleet: dict[str, Any]) -> None:
    faulty = ran(fleet, [[] for _ in fleet["faults"]])
    kept = {key: value for key, value in fleet["replica"].items() if key not in ("times", "spares")}
    plain = [
        make_replica(disturbance=Disturbance(fleet["jitter"], seed=number), **kept)
        for number in range(len(fleet["faults"]))
    ]
    run(plain, items(*fleet["requests"]), router=fleet["router"], workload=loop(fleet["most"]))
    assert [told(r.record) for r in faulty] == [told(r.record) for r in plain]
    assert [r.record.micro_batches for r in faulty] == [r.record.micro_batches for r in plain]


def test_a_run_that_is_counted_says_the_same_of_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "_MICRO_BATCHES_PER_TOTAL", 32)
    faults = [RankFault(0.4, 1, False), RankFault(1.5, 0, True), RankFault(2.7, 1, False)]
    kept, counted = (make_replica(faults=faults, times=TIMES) for _ in range(2))
    counted.totals = RunningTotals(counted.coordinator.scheduler.limits.depth.most)
    for replica in (kept, counted):
        run(replica, items(*[(40, 60)] * 16))
    whole = summarize(Fleet([kept.record]))
    summary = counted.totals.summary(counted.record)
    assert len(summary["faults"]) == 3
    assert all(fault.pop("replay") is None for fault in summary["faults"])  # which is read off the record
    assert all(fault.pop("replay") > 0 for fault in whole["faults"])
    assert summary["faults"] == whole["faults"]
    for key in ("duration", "recovery_seconds", "p99_e2el_ms"):
        assert summary[key] == pytest.approx(whole[key])
    assert summary["bubble_seconds"] == pytest.approx(whole["bubble_seconds"])


def one_stage(*faults: RankFault, times: FaultsConfig = TIMES, **how: Any) -> Replica:
    """One request of 40 and 30 tokens in chunks of 16, alone on one stage."""
    how = {"depth": 1, "layers": (2,)} | how
    replica = make_replica(SarathiConfig(chunk=16), faults=faults, times=times, **how)
    run(replica, items((40, 30)))
    return replica


def prefill_seconds(replica: Replica, tokens: int) -> float:
    """Seconds of a prefill in chunks of 16, by the cost model."""
    lengths = [16] * (tokens // 16) + [tokens % 16] * (tokens % 16 > 0)
    shapes = [
        MicroBatchShape([(length, 16 * number)], sampled=number == len(lengths) - 1)
        for number, length in enumerate(lengths)
    ]
    return sum(replica.pipeline.costs.seconds(shape)[0] for shape in shapes)


@pytest.mark.parametrize(("hangs", "detect"), [(False, 0.03), (True, 0.4)])
@pytest.mark.parametrize("received", [0, 7, 29])
def test_a_fault_costs_its_detection_its_repair_and_the_prefill_again(
    received: int, hangs: bool, detect: float
) -> None:
    calm = one_stage()
    (request,) = calm.record.requests
    step = request.token_times[1] - request.token_times[0]
    at = request.token_times[received] - step / 2
    replica = one_stage(RankFault(at, 0, hangs))
    (fault,) = replica.record.faults
    assert fault.reason == ("hang" if hangs else "process")
    assert fault.since == pytest.approx(at)
    assert fault.detected - fault.since == pytest.approx(detect)
    assert fault.parts == {"stop": 0.02, "start": 0.5, "rendezvous": 0.05, "weights": 0.2}
    assert fault.seconds == pytest.approx(detect + REPAIR_S)
    assert fault.ranks == [0]
    assert fault.requests == 1
    assert fault.tokens == (32 if received == 0 else 40 + received - 1)  # the chunk or the decode in flight was lost
    (again,) = replica.record.requests
    assert again.token_times[:received] == pytest.approx(request.token_times[:received])
    up = at + detect + REPAIR_S
    token = up + prefill_seconds(replica, 40 + received)
    assert again.token_times[received] == pytest.approx(token)
    rest = request.token_times[-1] - request.token_times[received]
    assert again.token_times[-1] == pytest.approx(token + rest)
    recovery = Ledger(replica.record).seconds_by_cause(0)[Cause.RECOVERY]
    assert recovery == pytest.approx(detect + REPAIR_S)


def test_a_spare_takes_the_place_and_another_one_is_back_after_a_start() -> None:
    first = RankFault(0.05, 0, False)
    again = (RankFault(0.05 + 0.03 + 0.37 + 0.01, 0, False), RankFault(1.2, 0, False))
    replica = one_stage(first, *again, spares=1, layers=(3,), devices=[Device(20.0)])
    one, two, three = replica.record.faults
    assert one.parts["start"] == pytest.approx(0.1)
    begun = two.detected + 0.02
    stands_by = one.detected + 0.02 + 0.5
    assert 0 < stands_by - begun < 0.5
    assert two.parts["start"] == pytest.approx(stands_by - begun + 0.1)
    assert three.parts["start"] == pytest.approx(0.1)
    without = one_stage(first, *again, layers=(3,), devices=[Device(20.0)])
    assert {fault.parts["start"] for fault in without.record.faults if fault.parts} == {0.5}


def test_what_has_left_the_stage_that_fails_still_comes() -> None:
    slow = {"layers": (1, 1), "devices": [Device(send_s=0.0)] * 2, "depth": 2}
    calm = make_replica(SarathiConfig(chunk=16), faults=(), times=TIMES, **slow)
    run(calm, items((16, 1), (16, 1)))
    first, second = (span for span in calm.record.spans if span.stage == 0)
    at = (first.end + second.end) / 2
    replica = make_replica(SarathiConfig(chunk=16), faults=[RankFault(at, 0, False)], times=TIMES, **slow)
    run(replica, items((16, 1), (16, 1)))
    (fault,) = replica.record.faults
    early, late = (request.token_times[0] for request in replica.record.requests)
    assert early == calm.record.requests[0].token_times[0]
    assert fault.requests == 1
    assert late > (fault.up or 0.0) >= at + REPAIR_S


def test_an_ended_process_is_replaced_between_requests_and_a_hang_is_not_noticed() -> None:
    ends = []
    for hangs in (False, True):
        replica = make_replica(faults=[RankFault(2.0, 1, hangs)], times=TIMES)
        run(replica, items((8, 4), (8, 4, 5.0)))
        (fault,) = replica.record.faults
        assert fault.since == pytest.approx(5.0 if hangs else 2.0)
        ends.append(replica.pipeline.clock.now())
    assert ends[1] - ends[0] == pytest.approx(0.4 + REPAIR_S)


def test_a_fault_during_a_repair_begins_it_again() -> None:
    faults = [RankFault(0.02, 1, False), RankFault(0.3, 0, False)]
    replica = make_replica(faults=faults, times=TIMES)
    run(replica, items(*[(40, 10)] * 4))
    one, two = replica.record.faults
    assert one.up == two.since == two.detected == pytest.approx(0.33)
    assert not one.ranks
    assert two.ranks == [0, 1]
    assert two.up == pytest.approx(0.33 + REPAIR_S)
    assert (two.requests, two.tokens) == (0, 0)


def test_one_fault_too_many_ends_the_run() -> None:
    faults = [RankFault(1.0 * number, 0, False) for number in range(4)]
    replica = make_replica(faults=faults, times=TIMES, max_recoveries=2)
    text = r"rank 0 \(stage 0\): its process ended; fault 3 within 600 s \(parallel.max_recoveries=2\)"
    with pytest.raises(PipelineError, match=text):
        run(replica, items((40, 100, 2.5)))


@pytest.mark.parametrize("most", [None, 1])
def test_a_policy_that_takes_nothing_is_told_while_ranks_fail(most: int | None) -> None:
    replica = make_replica(faults=draw_faults(FaultsConfig(rank_mtbf_s=100.0), 2, seed=1), times=TIMES)
    sarathi = replica.coordinator.scheduler
    replica.coordinator.scheduler = TakesNothing(SarathiConfig(), sarathi.limits, sarathi.pool)
    with pytest.raises(PipelineError, match="scheduler stalled"):
        run(replica, items((4, 4), (4, 4)), workload=loop(most))


def drawn(config: FaultsConfig, **how: Any) -> Iterator[RankFault]:
    return draw_faults(config, 8, **{"seed": 3} | how)


def test_faults_are_as_many_as_asked_for() -> None:
    config = FaultsConfig(rank_mtbf_s=4000.0, hang_share=0.25)
    faults = list(islice(drawn(config), 4000))
    gaps = np.diff([fault.at for fault in faults])
    assert gaps.mean() == pytest.approx(500.0, rel=0.07)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.1)
    assert np.mean([fault.hangs for fault in faults]) == pytest.approx(0.25, abs=0.03)
    assert np.bincount([fault.rank for fault in faults]) == pytest.approx([500] * 8, rel=0.2)
    assert faults == list(islice(drawn(config), 4000))
    assert faults != list(islice(drawn(config, seed=4), 4000))
    half = [replace(fault, at=fault.at / 2) for fault in faults]
    sooner = islice(drawn(replace(config, rank_mtbf_s=2000.0)), 4000)
    for fault, other in zip(half, sooner, strict=True):
        assert (fault.rank, fault.hangs) == (other.rank, other.hangs)
        assert fault.at == pytest.approx(other.at)


def test_times_that_are_given_are_those_of_the_first_replica() -> None:
    config = FaultsConfig(at=(7.5, 2.0))
    assert [fault.at for fault in drawn(config)] == [2.0, 7.5]
    assert not list(drawn(config, replica=1))
    assert not list(drawn(FaultsConfig()))
