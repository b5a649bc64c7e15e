"""Stragglers: a stage that slows down is found with its time, its factor and its cost; content and noise are none."""

from __future__ import annotations

import random
from typing import Any

import pytest

from gapless.runtime.analysis.ledger.ledger import Ledger
from gapless.runtime.analysis.ledger.stragglers import find_stragglers
from gapless.runtime.core.messages import Span
from gapless.runtime.core.run_record import DecodesRecord, MicroBatchRecord, RunRecord, SegmentRecord, Wait


def run_of(num_stages: int, slow: dict[int, tuple[range, float]], **options: Any) -> Ledger:
    """Return the checked ledger of `record_of`."""
    ledger = Ledger(record_of(num_stages, slow, **options))
    ledger.check()
    return ledger


def record_of(
    num_stages: int,
    slow: dict[int, tuple[range, float]],
    *,
    seed: int = 0,
    weights: tuple[float, ...] = (),
    head: float = 5e-5,
    count: int = 400,
) -> RunRecord:
    """Make a run whose micro-batches grow and shrink, as many in flight as there are stages.

    Stage `s` takes a factor longer for those in `slow[s]`.
    """
    rng = random.Random(seed)
    record = RunRecord(num_stages, 100)
    free = [0.0] * num_stages
    done = [0.0] * num_stages  # the ends of the last micro-batches
    for number in range(count):
        chunk, decodes = rng.choice([0, 32, 64, 256]), rng.randint(1, 30)
        there = max(free[0], done[number % num_stages])
        chunks = [SegmentRecord(0, 0, chunk)] if chunk else []
        waits = [Wait(free[0], there, "depth_full")] if there > free[0] else []
        record.micro_batches.append(
            MicroBatchRecord(number, there, chunks, DecodesRecord.at([1] * decodes, [9] * decodes), waits)
        )
        for stage in range(num_stages):
            seconds = 0.002 + 1e-5 * (chunk + decodes) + (head * decodes if stage == num_stages - 1 else 0.0)
            seconds *= (weights[stage] if weights else 1.0) * rng.uniform(0.9, 1.15) * (8 if rng.random() < 0.02 else 1)
            within, factor = slow.get(stage, (range(0), 1.0))
            begin = max(there, free[stage])
            there = free[stage] = begin + seconds * (factor if number in within else 1.0)
            record.spans.append(Span(number, stage, begin, begin, begin, there, there))
        done[number % num_stages] = there
    return record


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("seed", range(5))
def test_neither_content_nor_uneven_stages_nor_hiccups_are_stragglers(num_stages: int, seed: int) -> None:
    assert find_stragglers(run_of(num_stages, {}, seed=seed)) == []
    assert find_stragglers(run_of(num_stages, {}, seed=seed, weights=(2.0, 1.0, 1.0, 0.5))) == []
    assert find_stragglers(run_of(num_stages, {}, seed=seed, head=3e-4)) == []


@pytest.mark.parametrize("num_stages", [2, 3, 8])
@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("factor", [2.0, 5.0])
@pytest.mark.parametrize("when", [range(160, 256), range(64, 336), range(288)])
def test_a_stage_that_slows_down_is_found(num_stages: int, stage: int, factor: float, when: range) -> None:
    ledger = run_of(num_stages, {stage: (when, factor)})
    (found,) = find_stragglers(ledger)
    lane = ledger.lanes[stage]
    assert found.stage == stage
    assert found.slowdown == pytest.approx(factor, rel=0.1)
    assert (found.start, found.end) == (lane.begin[when.start], lane.end[when.stop - 1])
    plain = run_of(num_stages, {})
    others = [other for other in range(num_stages) if other != stage]
    more = sum(sum(run.seconds_by_cause(s).values()) * sign for run, sign in ((ledger, 1), (plain, -1)) for s in others)
    assert found.waited == pytest.approx(more, rel=0.3 if len(when) < 200 else 0.5)  # few are left to say what is usual
    assert found.summary(1.0)["start"] == found.start - 1.0


def test_each_is_found_and_too_short_a_run_has_none() -> None:
    ledger = run_of(4, {1: (range(96, 160), 3.0), 3: (range(240, 304), 4.0)})
    assert [found.stage for found in find_stragglers(ledger)] == [1, 3]
    assert find_stragglers(run_of(4, {1: (range(10, 20), 9.0)}, count=31)) == []
    assert find_stragglers(run_of(2, {}, count=0)) == []


@pytest.mark.parametrize(("number", "factor"), [(0, 200.0), (200, 300.0), (380, 250.0)])
def test_a_single_micro_batch_that_takes_a_share_of_the_run_is_a_stall(number: int, factor: float) -> None:
    ledger = run_of(2, {1: (range(number, number + 1), factor)})
    (found,) = find_stragglers(ledger)
    lane = ledger.lanes[1]
    assert (found.stage, found.start, found.end) == (1, lane.begin[number], lane.end[number])
    assert found.slowdown == pytest.approx(factor, rel=0.3)
    assert find_stragglers(run_of(2, {1: (range(number, number + 1), factor / 40)})) == []


def test_a_slow_stage_that_nobody_waits_for_is_none() -> None:
    assert find_stragglers(run_of(2, {1: (range(160, 256), 2.0)}, weights=(1.0, 0.05), head=0.0)) == []


def test_what_a_straggler_costs_is_the_same_with_another_within_its_time() -> None:
    alone = find_stragglers(run_of(4, {1: (range(96, 224), 6.0)}))
    both = find_stragglers(run_of(4, {1: (range(96, 224), 6.0), 3: (range(128, 176), 3.0)}))
    assert [found.stage for found in both] == [1, 3]
    assert both[0].waited == pytest.approx(alone[0].waited, rel=0.05)
