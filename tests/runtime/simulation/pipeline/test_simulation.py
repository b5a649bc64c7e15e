"""Simulated pipelines and fleets: what must hold of any, and what each knob does. No torch."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.conf.policies import POLICY_CONFIGS, SarathiConfig
from gapless.conf.sampling import SamplingParams
from gapless.parallel.placement import StageLink
from gapless.runtime.analysis.ledger.causes import UNEVEN_WORK, Cause
from gapless.runtime.analysis.ledger.fleet import Fleet
from gapless.runtime.analysis.ledger.ledger import Ledger
from gapless.runtime.analysis.ledger.running_totals import RunningTotals
from gapless.runtime.core.micro_batch import MicroBatch
from gapless.runtime.core.request import Request
from gapless.runtime.core.run_record import RunRecord
from gapless.runtime.core.work_item import WorkItem
from gapless.runtime.engine.replay import replay
from gapless.runtime.pipeline.protocol import PipelineError
from gapless.runtime.scheduler.policies import POLICIES
from gapless.runtime.scheduler.policies.sarathi import Sarathi
from gapless.runtime.simulation.cost.stage_costs import MicroBatchShape
from gapless.runtime.simulation.pipeline import replicas as simulation
from gapless.runtime.simulation.pipeline.replicas import ROUTERS, Replica, run_fleet
from gapless.runtime.simulation.pipeline.simulated_pipeline import Disturbance
from tests.support.closed_loops import loop
from tests.support.simulated_parts import LONGEST, Audited, Device, items, make_replica, run
from tests.support.tiers import HANGS_S, examples


@st.composite
def fleets(draw: st.DrawFn) -> dict[str, Any]:
    stages = draw(st.integers(1, 4))
    requests = st.tuples(st.integers(1, 70), st.integers(1, 50), st.floats(0, 0.4))
    policy = draw(st.sampled_from(POLICIES))
    return {
        "replicas": draw(st.integers(1, 3)),
        "router": draw(st.sampled_from(sorted(ROUTERS))),
        "most": draw(st.none() | st.integers(1, 6)),
        "requests": draw(st.lists(requests, min_size=1, max_size=14)),
        "seed": draw(st.integers(0, 99)),
        "jitter": draw(st.sampled_from([0.0, 0.3])),
        "straggler_rate": draw(st.sampled_from([0.0, 0.1])),
        "replica": {
            "policy": policy,
            "layers": draw(st.lists(st.integers(1, 3), min_size=stages, max_size=stages)),
            "devices": [Device(draw(st.sampled_from([1.0, 3.0]))) for _ in range(stages)],
            "batch": draw(st.integers(1, 5)),
            "depth": draw(st.none() | st.integers(1, 6)),
            "num_blocks": draw(st.integers(30, 90)),
            "stage_links": [StageLink(draw(st.booleans())) for _ in range(stages - 1)],
            "overlap_sends": draw(st.booleans()),
            "dispatch_s": draw(st.sampled_from([0.0, 0.002])),
            "result_s": draw(st.sampled_from([0.0, 0.003])),
        },
    }


def started(fleet: dict[str, Any], seed: int | None = None) -> list[Replica]:
    seed = fleet["seed"] if seed is None else seed
    return [
        make_replica(
            disturbance=Disturbance(fleet["jitter"], fleet["straggler_rate"], 4.0, seed=100 * seed + number),
            **fleet["replica"],
        )
        for number in range(fleet["replicas"])
    ]


def ran(fleet: dict[str, Any], seed: int | None = None) -> list[Replica]:
    replicas = started(fleet, seed)
    ended = run(replicas, items(*fleet["requests"]), router=fleet["router"], workload=loop(fleet["most"]))
    assert ended == len(fleet["requests"])
    return replicas


@settings(max_examples=examples(50))
@given(fleets())
def test_every_request_ends_and_no_bound_is_passed(fleet: dict[str, Any]) -> None:
    replicas = ran(fleet)
    work = items(*fleet["requests"])
    served = sorted((entry for replica in replicas for entry in replica.record.requests), key=lambda e: e.request)
    assert [entry.request for entry in served] == list(range(len(work)))
    for entry, item in zip(served, work, strict=True):
        assert (entry.prompt_tokens, entry.output_tokens) == (len(item.prompt), item.output_len)
        assert entry.finish_reason == "length"
        assert list(entry.token_times) == sorted(entry.token_times)
        assert entry.arrival >= item.arrival
        assert entry.arrival == item.arrival or fleet["most"]
    if fleet["most"]:
        ends = sorted(entry.finished for entry in served if entry.finished is not None)
        for entry in served:
            before = sum(other.arrival <= entry.arrival and other.request < entry.request for other in served)
            assert before - sum(end <= entry.arrival + 1e-12 for end in ends) < fleet["most"]
    for replica in replicas:
        pipeline, scheduler = replica.pipeline, replica.coordinator.scheduler
        assert isinstance(pipeline, Audited)
        assert pipeline.most <= pipeline.depth
        assert scheduler.pool.num_free == scheduler.pool.num_blocks
        assert not replica.unfinished
        assert not replica.queued_tokens
        assert not replica.coordinator.has_work
        check_spans(replica)


def check_spans(replica: Replica) -> None:
    """Stages are first in, first out and compute one micro-batch at a time; so are links."""
    pipeline, spans = replica.pipeline, replica.record.spans
    for stage in range(pipeline.num_stages):
        own = [span for span in spans if span.stage == stage]
        assert [span.micro_batch for span in own] == list(range(len(replica.record.micro_batches)))
        for span in own:
            assert max(span.input, span.ready) == span.begin <= span.end <= span.sent
            assert span.sent == span.end or not pipeline.overlap_sends
        for before, span in pairwise(own):
            assert before.sent == span.ready
            assert before.input <= span.input
    for micro_batch in range(len(replica.record.micro_batches)):
        row = sorted((span for span in spans if span.micro_batch == micro_batch), key=lambda span: span.stage)
        for before, span in pairwise(row):
            link = pipeline._links[before.stage]
            rows = replica.record.micro_batches[micro_batch].num_tokens
            least = Device().send(rows, link=link, scatter_gather=True)
            assert span.input >= before.end + least - 1e-12


@settings(max_examples=examples(25))
@given(fleets())
def test_time_is_conserved(fleet: dict[str, Any]) -> None:
    replicas = ran(fleet)
    for replica in replicas:
        Ledger(replica.record).check()
    Fleet([replica.record for replica in replicas]).check()


def told(record: RunRecord) -> object:
    return [list(r.token_times) for r in record.requests], [
        (s.micro_batch, s.stage, s.begin, s.end) for s in record.spans
    ]


@settings(max_examples=examples(15))
@given(fleets())
def test_a_seed_says_it_all(fleet: dict[str, Any]) -> None:
    first, again, other = (ran(fleet, seed) for seed in (1, 1, 2))
    assert [told(r.record) for r in first] == [told(r.record) for r in again]
    differs = [told(r.record) for r in first] != [told(r.record) for r in other]
    assert differs or not fleet["jitter"]


def ratios(replica: Replica) -> list[float]:
    """Stage times over what the cost model says, of a run."""
    pipeline = replica.pipeline
    assert isinstance(pipeline, Audited)
    right = {m.micro_batch: pipeline.costs.seconds(MicroBatchShape.of(m)) for m in pipeline.micro_batches}
    return [(span.end - span.begin) / right[span.micro_batch][span.stage] for span in replica.record.spans]


MANY = items(*[(5, 100)] * 40)


def test_without_disturbance_stages_take_what_the_cost_model_says() -> None:
    replica = make_replica(batch=2)
    run(replica, MANY[:4])
    assert ratios(replica) == pytest.approx([1.0] * len(replica.record.spans))


def test_jitter_keeps_the_mean_and_has_the_variation_asked_for() -> None:
    replica = make_replica(batch=1, disturbance=Disturbance(jitter=0.2, seed=3))
    run(replica, MANY)
    found = np.array(ratios(replica))
    assert len(found) > 7_500
    assert found.mean() == pytest.approx(1.0, abs=4 * 0.2 / len(found) ** 0.5)
    assert found.std() / found.mean() == pytest.approx(0.2, rel=0.05)
    assert found.min() > 0


def test_stragglers_are_as_many_and_as_slow_as_asked_for() -> None:
    replica = make_replica(batch=1, disturbance=Disturbance(straggler_rate=0.1, straggler_factor=3.0, seed=3))
    run(replica, MANY)
    found = np.array(ratios(replica))
    slow = found > 2.0
    assert found[slow] == pytest.approx(3.0)
    assert found[~slow] == pytest.approx(1.0)
    assert slow.mean() == pytest.approx(0.1, abs=4 * (0.09 / len(found)) ** 0.5)


def test_a_slow_device_is_the_busiest_and_the_others_wait_for_it() -> None:
    fast, slow = Device(send_s=0.0), Device(slower=3.0, send_s=0.0)
    replica = make_replica(layers=(2, 2, 2), devices=[fast, slow, fast], depth=4, batch=2)
    run(replica, items(*[(40, 60)] * 16))
    ledger = Ledger(replica.record)
    busy = [ledger.busy_seconds(stage) / ledger.span_seconds for stage in range(3)]
    assert busy[1] > 0.95
    assert max(busy[0], busy[2]) < 0.6
    waiting = ledger.seconds_by_cause(2)
    assert sum(waiting[cause] for cause in UNEVEN_WORK) > 0.8 * sum(waiting.values())
    assert waiting[Cause.CONTROL] < 0.01 * sum(waiting.values())


def test_a_straggling_micro_batch_leaves_bubbles_downstream() -> None:
    calm, rough = (make_replica(batch=2, disturbance=Disturbance(0.0, rate, 20.0, seed=1)) for rate in (0.0, 0.02))
    for replica in (calm, rough):
        run(replica, items(*[(40, 60)] * 12))
    idle = []
    for replica in (calm, rough):
        seconds = Ledger(replica.record).seconds_by_cause(1)
        idle.append(sum(seconds[cause] for cause in UNEVEN_WORK))
    assert idle[1] > 3 * idle[0]


@pytest.mark.parametrize("overlap", [True, False])
def test_a_send_that_is_not_overlapped_holds_the_stage_up(overlap: bool) -> None:
    links, devices = [StageLink(between_nodes=False)], [Device(send_s=0.01)] * 2
    replica = make_replica(devices=devices, stage_links=links, overlap_sends=overlap, depth=3)
    run(replica, items(*[(40, 40)] * 12))
    idle = Ledger(replica.record).seconds_by_cause(0)
    first = [span for span in replica.record.spans if span.stage == 0]
    held = sum(span.sent - span.end for span in first)
    assert held == pytest.approx(0.0 if overlap else len(first) * 0.01, rel=0.02)
    last = first[-1].sent - first[-1].end  # which holds nothing up
    assert idle[Cause.TRANSPORT] == pytest.approx(0.0 if overlap else held - last)


def test_a_link_carries_one_activation_at_a_time() -> None:
    replica = make_replica(devices=[Device(send_s=0.2)] * 2, stage_links=[StageLink(False)], depth=4, batch=1)
    run(replica, items(*[(4, 6)] * 8))
    inputs = [span.input for span in replica.record.spans if span.stage == 1]
    assert min(np.diff(inputs)) >= 0.2
    assert Ledger(replica.record).seconds_by_cause(1)[Cause.TRANSPORT] > 0.9 * 0.2 * (len(inputs) - 1)


def test_a_link_between_nodes_is_slower() -> None:
    ends = []
    for crosses in (False, True):
        replica = make_replica(devices=[Device(send_s=0.02)] * 2, stage_links=[StageLink(crosses)], depth=1)
        run(replica, items((4, 10)))
        ends.append(replica.pipeline.clock.now())
    assert ends[1] - ends[0] == pytest.approx(10 * 0.02)


def test_the_ways_to_and_from_the_coordinator_cost_each_token() -> None:
    ends = []
    for dispatch, result in ((0.0, 0.0), (0.01, 0.0), (0.0, 0.02)):
        replica = make_replica(dispatch_s=dispatch, result_s=result)
        run(replica, items((4, 10)))
        ends.append(replica.record.requests[0].token_times[-1])
    assert ends[1] - ends[0] == pytest.approx(10 * 0.01)
    assert ends[2] - ends[0] == pytest.approx(10 * 0.02)


def test_without_the_host_its_overhead_is_left_out() -> None:
    ends = []
    for host in (True, False):
        replica = make_replica(host=host, layers=(2,))
        run(replica, items((4, 10)))
        ends.append(replica.pipeline.clock.now())
    assert ends[0] - ends[1] == pytest.approx(10 * Device().host.step)


@pytest.mark.parametrize("front", [(0.0, 0.0), (0.5, 0.0), (0.5, 0.01)])
def test_the_way_to_the_engine_is_a_part_of_the_time_to_first_token(front: tuple[float, float]) -> None:
    replica = make_replica()
    assert sum(run_fleet([replica], items((4, 10), (40, 3)), workload=loop(1), front=front)) == 2
    alone = make_replica()
    run(alone, items((4, 10)))
    first, second = (each.record for each in (replica, alone))
    plain = second.requests[0].token_times[0]
    assert first.requests[0].arrival == 0.0
    assert first.requests[0].token_times[0] == pytest.approx(plain + front[0] + 4 * front[1])
    assert first.requests[1].arrival == pytest.approx(first.requests[0].token_times[-1])
    begun = min(span.begin for span in first.spans if span.micro_batch == first.micro_batches[-3].micro_batch)
    assert begun - first.requests[1].arrival == pytest.approx(front[0] + 40 * front[1], abs=1e-3)


def replayed(fleet: dict[str, Any]) -> RunRecord:
    """Return the record of a fleet's first replica that serves all requests by `replay`."""
    replica, numbers = started(fleet)[0], iter(range(len(fleet["requests"])))

    def make(item: WorkItem, arrival: float) -> Request:
        params = SamplingParams(max_tokens=item.output_len, ignore_eos=True)
        return Request(next(numbers), item.prompt, params, arrival=arrival, max_model_len=LONGEST)

    for _ in replay(replica.coordinator, items(*fleet["requests"]), make, workload=loop(fleet["most"])):
        pass
    return replica.record


@settings(max_examples=examples(25))
@given(fleets())
def test_a_fleet_of_one_is_a_replay(fleet: dict[str, Any]) -> None:
    fleet["replicas"] = 1
    (replica,) = ran(fleet)
    other = replayed(fleet)
    assert told(replica.record) == told(other)
    assert [r.arrival for r in replica.record.requests] == [r.arrival for r in other.requests]


@settings(max_examples=examples(25))
@given(fleets(), st.integers(0, 1000))
def test_a_request_that_arrives_as_a_token_comes_is_dispatched_as_in_a_replay(fleet: dict[str, Any], at: int) -> None:
    fleet["replicas"] = 1
    (replica,) = ran(fleet)
    times = [time for request in replica.record.requests for time in request.token_times]
    fleet["requests"] = [*fleet["requests"], (4, 4, times[at % len(times)])]
    assert told(ran(fleet)[0].record) == told(replayed(fleet))


def makespan(router: str, work: list[WorkItem], replicas: int = 2) -> float:
    fleet = [make_replica(SarathiConfig(chunk=16), batch=4) for _ in range(replicas)]
    run(fleet, work, router=router)
    return max(replica.pipeline.clock.now() for replica in fleet)


def test_routers_that_look_balance_better_under_skew() -> None:
    skewed = items(*[(100, 20, 0.0) if n % 2 else (4, 2, 0.0) for n in range(24)])
    assert makespan("least_tokens", skewed) < 0.7 * makespan("round_robin", skewed)
    coming = [WorkItem(bytes(100 if n % 2 else 4), 20 if n % 2 else 2, 0.02 * n) for n in range(40)]
    assert makespan("least_requests", coming) < 0.9 * makespan("round_robin", coming)


@settings(max_examples=examples(15))
@given(st.lists(st.tuples(st.integers(1, 70), st.integers(1, 50)), min_size=1, max_size=30), st.integers(2, 4))
def test_least_tokens_spreads_what_comes_at_once(requests: list[tuple[int, int]], count: int) -> None:
    fleet = [make_replica(num_blocks=2000) for _ in range(count)]
    run(fleet, items(*requests), router="least_tokens")
    tokens = [sum(r.prompt_tokens + r.output_tokens for r in replica.record.requests) for replica in fleet]
    assert max(tokens) - min(tokens) <= max(prompt + output for prompt, output in requests)


@pytest.mark.parametrize("most", [None, 20])
def test_a_run_that_is_counted_is_let_go_of_on_the_way(monkeypatch: pytest.MonkeyPatch, most: int | None) -> None:
    monkeypatch.setattr(simulation, "_MICRO_BATCHES_PER_TOTAL", 32)
    replica = make_replica(SarathiConfig(chunk=16), batch=4)
    replica.totals = RunningTotals(replica.coordinator.scheduler.limits.depth.most)
    held = 0
    work = items(*[(20, 5, 0.0)] * 300)
    for _ in run_fleet([replica], work, workload=loop(most)):
        held = max(held, len(replica.record.micro_batches))
    assert replica.coordinator.next_micro_batch > 300
    assert held <= 33


def test_by_turns_each_replica_gets_as_many() -> None:
    fleet = [make_replica() for _ in range(3)]
    run(fleet, items(*[(5, 3)] * 10), router="round_robin")
    assert [[r.request for r in replica.record.requests] for replica in fleet] == [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]


class TakesNothing(Sarathi):
    def fill(self, batch: MicroBatch) -> None:
        pass


def test_a_policy_that_takes_nothing_is_told() -> None:
    replica = make_replica()
    sarathi = replica.coordinator.scheduler
    replica.coordinator.scheduler = TakesNothing(SarathiConfig(), sarathi.limits, sarathi.pool)
    with pytest.raises(PipelineError, match="scheduler stalled: 2 unfinished requests"):
        run(replica, items((4, 4), (4, 4)))


def test_a_simulation_imports_no_torch() -> None:
    rooms = "gapless.runtime.simulation.pipeline.replicas, gapless.runtime.analysis.report.write_folder"
    code = f"import sys, {rooms}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=HANGS_S)
    assert done.stdout == "False\n"


def test_every_policy_is_simulated_alone() -> None:
    for policy in POLICY_CONFIGS:
        replica = make_replica(policy, layers=(1, 2, 1))
        assert run(replica, items(*[(30, 10)] * 12)) == 12
