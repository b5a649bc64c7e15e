"""The difference of two runs: exact sums over random pipelines, and that it names what was planted."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.runtime.analysis.ledger.causes import Cause
from gapless.runtime.analysis.ledger.fleet import Fleet
from gapless.runtime.analysis.report.difference.makespan_difference import (
    COMPUTE_PARTS,
    PARTS,
    SPEED,
    STAGES,
    WORK,
    MakespanDifference,
    compare_makespans,
)
from gapless.runtime.analysis.report.difference.run_side import LEDGER_PARTS, RunSide
from gapless.runtime.core.latencies import completed_requests, latencies
from gapless.runtime.core.run_record import RunRecord
from tests.support.simulated_parts import Device, items, make_replica, run
from tests.support.tiers import examples

REQUESTS = [(8 + 7 * n % 60, 4 + 5 * n % 17) for n in range(40)]
ARRIVING = [(*lengths, 0.03 * n) for n, lengths in enumerate(REQUESTS)]


def simulated(*requests: tuple[int, ...], policy: Any = "sarathi", **how: Any) -> RunRecord:
    replica = make_replica(policy, **how)
    assert run(replica, items(*requests)) == len(requests)
    return replica.record


def fleet(*requests: tuple[int, ...], **how: Any) -> Fleet:
    return Fleet([simulated(*(requests or REQUESTS), **how)])


def compared(base: Fleet, other: Fleet) -> MakespanDifference:
    return compare_makespans(RunSide(base), RunSide(other))


LAYERS = st.sampled_from([(4,), (2, 2), (3, 1), (1, 2, 1)])
SETTING = st.fixed_dictionaries(
    {
        "policy": st.sampled_from(["sarathi", "orca_best", "equal_time", "prefill_first"]),
        "layers": LAYERS,
        "batch": st.integers(1, 5),
        "dispatch_s": st.sampled_from([0.0, 0.004]),
        "result_s": st.sampled_from([0.0, 0.003]),
        "overlap_sends": st.booleans(),
    }
)
LENGTHS = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 12), st.floats(0, 0.5)), min_size=1, max_size=12)


@settings(max_examples=examples(60))
@given(SETTING, SETTING, LENGTHS, LENGTHS, st.booleans())
def test_everything_sums_to_the_change(
    base_how: dict[str, Any], run_how: dict[str, Any], lengths: list[Any], others: list[Any], same: bool
) -> None:
    base, other = fleet(*lengths, **base_how), fleet(*(lengths if same else others), **run_how)
    found = compared(base, other)
    change = other.span_seconds - base.span_seconds
    exact = pytest.approx(change, abs=1e-9 * (base.span_seconds + other.span_seconds))
    assert found.change == change
    assert sum(found.parts.values()) == exact
    assert len(found.by_stage) == (base.num_stages if base.num_stages == other.num_stages else 0)
    for stage, parts in enumerate(found.by_stage):
        assert parts.keys() == set(PARTS)
        assert sum(parts.values()) == exact
        busy = other.busy_seconds(stage) - base.busy_seconds(stage)
        assert sum(parts[part] for part in COMPUTE_PARTS) == pytest.approx(busy, abs=1e-9)
        for cause, seconds in other.seconds_by_cause(stage).items():
            assert parts[cause] == pytest.approx(seconds - base.seconds_by_cause(stage)[cause], abs=1e-9)
    back = compared(other, base)
    for part, seconds in found.parts.items():
        assert back.parts[part] == pytest.approx(-seconds, abs=1e-6)
    for part, seconds in found.before.items():
        busy = base.busy_seconds() if part == LEDGER_PARTS[0] else base.seconds_by_cause()[Cause(part)]
        assert seconds == pytest.approx(busy / base.num_stages, abs=1e-9)


@settings(max_examples=examples(10))
@given(SETTING, LENGTHS)
def test_a_run_does_not_differ_from_itself(how: dict[str, Any], lengths: list[Any]) -> None:
    one = fleet(*lengths, **how)
    found = compared(one, one)
    assert set(found.parts.values()) == {0.0}
    assert found.slowdown == pytest.approx(1.0)


@pytest.mark.parametrize("slow", [0, 1])
def test_a_slow_stage(slow: int) -> None:
    devices = [Device(1.5 if stage == slow else 1.0) for stage in range(2)]
    found = compared(fleet(host=False), fleet(host=False, devices=devices))
    assert (found.origin.part, found.origin.stage) == (SPEED, slow)
    assert found.slowdowns == pytest.approx([1.5 if stage == slow else 1.0 for stage in range(2)], rel=0.05)
    assert found.by_stage[1 - slow][SPEED] == pytest.approx(0, abs=0.1 * found.change)


def test_a_slow_stage_under_load_that_changes_what_micro_batches_hold() -> None:
    devices = [Device(), Device(1.5)]
    found = compared(fleet(*ARRIVING, host=False), fleet(*ARRIVING, host=False, devices=devices))
    assert found.micro_batches[0] != found.micro_batches[1]
    assert (found.origin.part, found.origin.stage) == (SPEED, 1)
    assert found.slowdowns == pytest.approx([1.0, 1.5], rel=0.05)


def test_every_stage_slower() -> None:
    found = compared(fleet(host=False), fleet(host=False, devices=[Device(2.0)] * 2))
    assert (found.origin.part, found.origin.stage) == (SPEED, None)
    assert found.slowdown == pytest.approx(2.0, rel=0.05)


def test_layers_moved_from_one_stage_to_another() -> None:
    found = compared(fleet(layers=(2, 2)), fleet(layers=(3, 1)))
    assert (found.origin.part, found.origin.stage) == (SPEED, 0)
    assert found.slowdowns[0] > 1.2
    assert found.slowdowns[1] < 0.8


def test_a_late_coordinator() -> None:
    found = compared(fleet(depth=2), fleet(depth=2, dispatch_s=0.004))
    assert (found.origin.part, found.origin.stage) == ("control", 0)


@pytest.mark.parametrize(("before", "stage"), [((1, 1), 1), ((1, 1, 1), 1)])
def test_a_slow_link(before: tuple[int, ...], stage: int) -> None:
    found = compared(
        fleet(layers=before), fleet(layers=before, devices=[Device(send_s=0.006)] + [Device()] * (len(before) - 1))
    )
    assert (found.origin.part, found.origin.stage) == ("transport", stage)


def test_another_policy() -> None:
    lengths = [(50, 3 + n % 5) for n in range(40)]
    found = compared(fleet(*lengths, host=False), fleet(*lengths, host=False, policy="orca_worst"))
    assert (found.origin.part, found.origin.stage) == ("pb2_prefill_decode", 1)
    assert found.origin.seconds > 0.9 * found.change > 0


def test_one_long_request_more() -> None:
    found = compared(fleet(*ARRIVING), fleet(*ARRIVING[:20], (90, 30, 0.03 * 20), *ARRIVING[20:]))
    assert found.origin.part == WORK
    assert found.parts[WORK] == pytest.approx(sum(found.parts[part] for part in COMPUTE_PARTS), rel=0.05)


def test_requests_of_a_run() -> None:
    one = fleet(*ARRIVING)
    requests = RunSide(one).requests
    assert [(each.prompt, each.output) for _, each in sorted(requests.items())] == REQUESTS
    latency = sum(each.latency for each in requests.values()) / len(requests)
    assert latency * 1e3 == pytest.approx(latencies(completed_requests(one.records[0]))["e2el"].mean())
    assert sum(each.bubble for each in requests.values()) == pytest.approx(sum(bubble for _, bubble in one.served))


def test_twice_the_work_and_another_number_of_stages() -> None:
    assert compared(fleet(), fleet(*REQUESTS, *REQUESTS)).origin.part == WORK
    found = compared(fleet(layers=(4,)), fleet(layers=(2, 2)))
    assert found.by_stage == []
    assert found.origin.part == STAGES
    assert found.parts[STAGES] < 0


def test_replicas_are_one_run() -> None:
    one = [simulated(*REQUESTS[:20]), simulated(*REQUESTS[20:])]
    two = [simulated(*REQUESTS[:20]), simulated(*REQUESTS[20:], devices=[Device(), Device(2.0)])]
    base, other = Fleet(one), Fleet(two)
    found = compared(base, other)
    assert (found.origin.part, found.origin.stage) == (SPEED, 3)
    assert sum(found.parts.values()) == pytest.approx(other.span_seconds - base.span_seconds)
