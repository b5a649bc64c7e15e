"""The difference of two runs: exact sums over random pipelines, and that it names what was planted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.conf.policies import POLICY_CONFIGS
from gapless.runtime.core.run_record import RunRecord
from gapless.runtime.difference.difference import (
    COMPUTE_PARTS,
    LEDGER_PARTS,
    PARTS,
    SPEED,
    STAGES,
    WORK,
    compare_makespans,
)
from gapless.runtime.difference.request_difference import NO_REQUEST, RequestDifference, compare_requests
from gapless.runtime.difference.segments import Segments
from gapless.runtime.difference.tail_difference import compare_tails
from gapless.runtime.ledger.fleet import Fleet
from gapless.runtime.ledger.latencies import completed_requests, latencies
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


def by_request(base: Fleet, other: Fleet) -> RequestDifference:
    return compare_requests(base, other, compare_makespans(base, other).weights)


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
    found = compare_makespans(base, other)
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
    back = compare_makespans(other, base)
    for part, seconds in found.parts.items():
        assert back.parts[part] == pytest.approx(-seconds, abs=1e-6)
    requests = compare_requests(base, other, found.weights)
    assert sum(each.change for each in requests.changes) == exact
    for part, seconds in found.before.items():
        mine = sum(each.base[LEDGER_PARTS.index(part)] for each in requests.changes)
        assert mine == pytest.approx(seconds, abs=1e-9)
    if same:
        assert requests.by_id
        assert not requests.only_base
        assert not requests.only_run
    for latency, tail in compare_tails(base, other).items():
        for side, of in ((tail.base, base), (tail.run, other)):
            values = latencies(completed_requests(of.records[0]))[latency]
            assert side.seconds == pytest.approx(np.percentile(values, 99) / 1e3, abs=1e-9)
            assert sum(side.parts.values()) == pytest.approx(side.seconds, abs=1e-9)
        assert sum(tail.parts.values()) == pytest.approx(tail.change, abs=1e-9)


@settings(max_examples=examples(10))
@given(SETTING, LENGTHS)
def test_a_run_does_not_differ_from_itself(how: dict[str, Any], lengths: list[Any]) -> None:
    one = fleet(*lengths, **how)
    found = compare_makespans(one, one)
    assert set(found.parts.values()) == {0.0}
    assert found.slowdown == pytest.approx(1.0)
    assert {each.change for each in by_request(one, one).changes} == {0.0}
    assert all(set(tail.parts.values()) == {0.0} for tail in compare_tails(one, one).values())


@settings(max_examples=examples(20))
@given(LENGTHS, st.lists(st.floats(0, 1), min_size=6, max_size=6))
def test_the_shares_of_a_micro_batch_s_tokens_sum_to_one(lengths: list[Any], weights: list[float]) -> None:
    segments = Segments(simulated(*lengths).micro_batches)
    shares = segments.shares(np.array(weights))
    assert (shares >= 0).all()
    assert np.bincount(segments.at, shares) == pytest.approx(1.0)


@pytest.mark.parametrize("slow", [0, 1])
def test_a_slow_stage(slow: int) -> None:
    devices = [Device(1.5 if stage == slow else 1.0) for stage in range(2)]
    found = compare_makespans(fleet(host=False), fleet(host=False, devices=devices))
    assert (found.origin.part, found.origin.stage) == (SPEED, slow)
    assert found.slowdowns == pytest.approx([1.5 if stage == slow else 1.0 for stage in range(2)], rel=0.05)
    assert found.by_stage[1 - slow][SPEED] == pytest.approx(0, abs=0.1 * found.change)


def test_a_slow_stage_under_load_that_changes_what_micro_batches_hold() -> None:
    devices = [Device(), Device(1.5)]
    found = compare_makespans(fleet(*ARRIVING, host=False), fleet(*ARRIVING, host=False, devices=devices))
    assert found.micro_batches[0] != found.micro_batches[1]
    assert (found.origin.part, found.origin.stage) == (SPEED, 1)
    assert found.slowdowns == pytest.approx([1.0, 1.5], rel=0.05)


def test_every_stage_slower() -> None:
    found = compare_makespans(fleet(host=False), fleet(host=False, devices=[Device(2.0)] * 2))
    assert (found.origin.part, found.origin.stage) == (SPEED, None)
    assert found.slowdown == pytest.approx(2.0, rel=0.05)


def test_layers_moved_from_one_stage_to_another() -> None:
    found = compare_makespans(fleet(layers=(2, 2)), fleet(layers=(3, 1)))
    assert (found.origin.part, found.origin.stage) == (SPEED, 0)
    assert found.slowdowns[0] > 1.2
    assert found.slowdowns[1] < 0.8


def test_a_late_coordinator() -> None:
    found = compare_makespans(fleet(depth=2), fleet(depth=2, dispatch_s=0.004))
    assert (found.origin.part, found.origin.stage) == ("control", 0)


@pytest.mark.parametrize(("before", "stage"), [((1, 1), 1), ((1, 1, 1), 1)])
def test_a_slow_link(before: tuple[int, ...], stage: int) -> None:
    found = compare_makespans(
        fleet(layers=before), fleet(layers=before, devices=[Device(send_s=0.006)] + [Device()] * (len(before) - 1))
    )
    assert (found.origin.part, found.origin.stage) == ("transport", stage)


def test_another_policy() -> None:
    lengths = [(50, 3 + n % 5) for n in range(40)]
    found = compare_makespans(fleet(*lengths, host=False), fleet(*lengths, host=False, policy="orca_worst"))
    assert (found.origin.part, found.origin.stage) == ("pb2_prefill_decode", 1)
    assert found.origin.seconds > 0.9 * found.change > 0


def test_one_long_request_more() -> None:
    base, other = fleet(*ARRIVING), fleet(*ARRIVING[:20], (90, 30, 0.03 * 20), *ARRIVING[20:])
    found, requests = compare_makespans(base, other), by_request(base, other)
    assert found.origin.part == WORK
    assert found.parts[WORK] == pytest.approx(sum(found.parts[part] for part in COMPUTE_PARTS), rel=0.05)
    assert requests.by_id
    (only,) = requests.only_run
    assert (only.name, only.tokens) == ("request 20", (90, 30))
    assert not requests.only_base


def test_twice_the_work_and_another_number_of_stages() -> None:
    assert compare_makespans(fleet(), fleet(*REQUESTS, *REQUESTS)).origin.part == WORK
    found = compare_makespans(fleet(layers=(4,)), fleet(layers=(2, 2)))
    assert found.by_stage == []
    assert found.origin.part == STAGES
    assert found.parts[STAGES] < 0


def test_other_requests_are_compared_by_length() -> None:
    requests = by_request(fleet(), fleet(*[(60 - prompt // 2, output) for prompt, output in REQUESTS]))
    assert not requests.by_id
    groups = [each for each in requests.changes if each.name != NO_REQUEST]
    assert sum(each.requests[0] for each in groups) == sum(each.requests[1] for each in groups) == len(REQUESTS)


def test_replicas_are_one_run() -> None:
    one = [simulated(*REQUESTS[:20]), simulated(*REQUESTS[20:])]
    two = [simulated(*REQUESTS[:20]), simulated(*REQUESTS[20:], devices=[Device(), Device(2.0)])]
    base, other = Fleet(one), Fleet(two)
    found = compare_makespans(base, other)
    assert (found.origin.part, found.origin.stage) == (SPEED, 3)
    assert sum(found.parts.values()) == pytest.approx(other.span_seconds - base.span_seconds)
    assert by_request(base, other)


def test_the_prompt_beside_a_tail_s_intervals() -> None:
    even = [(8, 12, 0.02 * n) for n in range(60)]
    how = {"policy": POLICY_CONFIGS["sarathi"](chunk=16), "batch": 6}  # the long prompt has seven chunks
    base, other = fleet(*even, **how), fleet(*even[:30], (110, 2, 0.6), *even[30:], **how)
    tail = compare_tails(base, other)["itl"]
    assert tail.change > 0
    assert tail.run.prompts[0][0] == 30
    assert sum(count for _, count in tail.run.requests) == tail.run.intervals
    assert max(tail.parts, key=lambda part: tail.parts[part]) in ("compute", "wait")
