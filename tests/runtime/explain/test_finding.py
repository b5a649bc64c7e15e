"""The roots of idle time: all idle seconds have one, and what was planted is the largest."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.runtime.core.messages import Span
from gapless.runtime.core.run_record import DecodesRecord, MicroBatchRecord, RunRecord, SegmentRecord, Wait
from gapless.runtime.explain.finding import LEAST_SHARE, Findings, find_causes, join_findings
from gapless.runtime.explain.roots import Root
from gapless.runtime.ledger.ledger import Ledger
from tests.runtime.ledger.test_stragglers import record_of
from tests.support.tiers import calibration, examples


def found_in(record: RunRecord, layers: list[int] | None = None) -> Findings:
    ledger = Ledger(record)
    found = find_causes(record, ledger, layers)
    idle = sum(ledger.seconds_by_cause().values())
    assert sum(each.seconds for each in found.found) == pytest.approx(idle)
    assert all(each.seconds > 0 for each in found.found)
    return found


def totals_of(record: RunRecord) -> tuple[np.ndarray, np.ndarray]:
    ledger = Ledger(record)
    stages = range(ledger.num_stages)
    idle = [list(ledger.seconds_by_cause(stage).values()) for stage in stages]
    return np.array([ledger.busy_seconds(stage) for stage in stages]), np.array(idle)


@settings(max_examples=examples(25))
@given(
    num_stages=st.integers(1, 5),
    count=st.integers(0, 60),
    seed=st.integers(0, 99),
    weights=st.lists(st.floats(0.2, 5.0), min_size=5, max_size=5),
    head=st.floats(0.0, 1e-3),
    slow=st.floats(1.0, 6.0),
    depth=st.integers(0, 6),
)
def test_each_idle_second_has_one_root(
    num_stages: int, count: int, seed: int, weights: list[float], head: float, slow: float, depth: int
) -> None:
    slowed = {0: (range(count // 3, count), slow)}
    record = record_of(num_stages, slowed, count=count, seed=seed, weights=tuple(weights), head=head)
    record.depth = depth
    found = found_in(record)
    assert sum(each.share for each in found.found) + found.busy_share == pytest.approx(1.0 if record.spans else 0.0)
    assert list(found.found) == sorted(found.found, key=lambda each: -each.seconds)
    assert found.largest is None or found.largest.share >= LEAST_SHARE


@pytest.mark.parametrize("num_stages", [2, 3, 8])
@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_that_is_slow_throughout(num_stages: int, stage: int) -> None:
    weights = tuple(2.5 if each == stage else 1.0 for each in range(num_stages))
    record = record_of(num_stages, {}, weights=weights, head=0.0)
    largest = found_in(record).largest
    assert largest is not None
    assert (largest.root, largest.stage) == (Root.SLOW_STAGE, stage)
    assert largest.evidence["ratio"] == pytest.approx(2.5, rel=0.15)
    even = record_of(num_stages, {}, head=0.0)
    removed = sum(totals_of(record)[1].sum(axis=1)) - sum(totals_of(even)[1].sum(axis=1))
    assert largest.seconds == pytest.approx(removed, rel=0.35)


def test_layers_explain_a_longer_time_or_do_not() -> None:
    record = record_of(2, {}, weights=(1.0, 2.0))
    for layers, root in (([4, 8], Root.UNEVEN_LAYERS), ([6, 6], Root.SLOW_STAGE), ([8, 4], Root.SLOW_STAGE)):
        largest = found_in(record, layers).largest
        assert largest is not None
        assert (largest.root, largest.stage, largest.evidence["layers"]) == (root, 1, layers[1])


@pytest.mark.parametrize("num_stages", [2, 4])
@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_that_is_slow_for_a_while(num_stages: int, stage: int) -> None:
    largest = found_in(record_of(num_stages, {stage: (range(160, 288), 5.0)})).largest
    assert largest is not None
    assert (largest.root, largest.stage) == (Root.STRAGGLER, stage)
    assert largest.evidence["ratio"] == pytest.approx(5.0, rel=0.2)
    assert 0 < largest.evidence["start_s"] < largest.evidence["end_s"]


def test_waits_for_the_way_are_not_for_the_depth() -> None:
    """Two micro-batches are in flight on four equal stages, and half as long under way as a stage takes."""
    record = RunRecord(4, 10, depth=2)
    done = [0.0, 0.0]
    free = [0.0] * 4
    for number in range(40):
        there = max(free[0], done[number % 2])
        waits = [Wait(free[0], there, "depth_full")] if there > free[0] else []
        record.micro_batches.append(
            MicroBatchRecord(number, there, [SegmentRecord(0, 0, 8)], DecodesRecord.at(), waits)
        )
        for stage in range(4):
            begin = max(there + (0.5 if stage else 0.0), free[stage])
            there = free[stage] = begin + 1.0
            record.spans.append(Span(number, stage, begin, begin, begin, there, there))
        done[number % 2] = there
    found = {each.root: each for each in found_in(record).found}
    assert found[Root.DEPTH].seconds > 40.0
    assert found[Root.TRANSPORT].seconds > 60.0
    assert found[Root.TRANSPORT].evidence["link_s"] == pytest.approx(0.5)


def test_replicas_are_one_sum() -> None:
    slow, even = record_of(2, {}, weights=(1.0, 3.0)), record_of(2, {}, seed=1)
    parts = [
        (name, find_causes(record, Ledger(record)), Ledger(record).span_seconds)
        for name, record in (("replica 0", even), ("replica 1", slow))
    ]
    span = max(own for *_, own in parts)
    joined = join_findings(parts, span)
    assert sum(each.share for each in joined.found) + joined.busy_share == pytest.approx(1.0)
    by_root = {each.root: each for each in joined.found}
    assert by_root[Root.SLOW_STAGE].where == "replica 1"
    assert by_root[Root.FILL_DRAIN].where == "replica 0"
    assert by_root[Root.FILL_DRAIN].evidence["unused_s"] == pytest.approx(span - parts[0][2])


def test_nothing_is_found_in_nothing() -> None:
    assert find_causes(RunRecord(2, 8), Ledger(RunRecord(2, 8))) == Findings((), 0.0, 2)
    alone = found_in(replace(record_of(1, {}, count=3)))
    assert alone.busy_share > 0.9


def test_a_long_run_takes_no_time_worth_waiting_for() -> None:
    record = record_of(2, {}, count=20_000)
    ledger = Ledger(record)
    began = time.process_time()
    find_causes(record, ledger)
    assert time.process_time() - began < 20 * calibration()
