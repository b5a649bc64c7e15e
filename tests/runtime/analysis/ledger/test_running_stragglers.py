"""Stragglers of a run without an end: those that the whole ledger finds, while they last, from its parts."""

from __future__ import annotations

import pytest

from gapless.runtime.analysis.ledger.ledger import Ledger
from gapless.runtime.analysis.ledger.running_ledger import RunningLedger
from gapless.runtime.analysis.ledger.running_stragglers import RunningStragglers
from gapless.runtime.analysis.ledger.stragglers import Straggler, find_stragglers
from gapless.runtime.core.run_record import RunRecord
from tests.runtime.analysis.ledger.test_stragglers import record_of
from tests.support.tiers import first_quick

PART = 24  # micro-batches that come at once


def watched(
    record: RunRecord, parts: RunningStragglers | None = None, size: int = PART
) -> tuple[RunningStragglers, list[Straggler]]:
    """Hand out a record part by part; return what watched it, and what was the newest straggler at each part."""
    ledger, found, seen = RunningLedger(record.num_stages), parts or RunningStragglers(), []
    growing = RunRecord(record.num_stages, record.num_blocks)
    by_number: dict[int, list] = {}
    for span in record.spans:
        by_number.setdefault(span.micro_batch, []).append(span)
    for at in range(0, len(record.micro_batches), size):
        for micro_batch in record.micro_batches[at : at + size]:
            spans = by_number[micro_batch.micro_batch]
            micro_batch.completed = spans[-1].end
            growing.micro_batches.append(micro_batch)
            growing.spans += spans
        part = ledger.count(growing)
        assert part is not None
        found.add(*part, ledger.idle)
        ledger.drop(growing)
        seen += found.current
    return found, seen


@pytest.mark.parametrize("num_stages", first_quick([4, 1, 2]))
@pytest.mark.parametrize("seed", first_quick(range(3)))
def test_neither_content_nor_uneven_stages_nor_hiccups_are_slow(num_stages: int, seed: int) -> None:
    for options in ({}, {"weights": (2.0, 1.0, 1.0, 0.5)}, {"head": 3e-4}):
        found, seen = watched(record_of(num_stages, {}, seed=seed, count=6000, **options))
        assert (seen, found.slow_seconds.tolist()) == ([], [0.0] * num_stages)


@pytest.mark.parametrize("num_stages", first_quick([3, 2, 8]))
@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("factor", [2.0, 5.0])
def test_a_slow_stage_is_named_while_it_is_slow(num_stages: int, stage: int, factor: float) -> None:
    record = record_of(num_stages, {stage: (range(5000, 6000), factor)}, count=8000)
    found, seen = watched(record)
    (whole,) = find_stragglers(Ledger(record))
    assert {each.stage for each in seen} == {whole.stage} == {stage}
    assert found.current == []
    last = seen[-1]
    assert last.slowdown == pytest.approx(factor, rel=0.15)
    assert last.start == pytest.approx(whole.start, abs=2.5)
    assert last.end == pytest.approx(whole.end, abs=2.5)
    assert last.waited == pytest.approx(whole.waited, rel=0.35)
    assert found.slow_seconds[stage] == pytest.approx(last.end - last.start, rel=0.01)
    assert found.slow_seconds.sum() == found.slow_seconds[stage]


def test_micro_batches_may_come_one_by_one() -> None:
    _, seen = watched(record_of(2, {1: (range(1200, 1500), 4.0)}, count=1500), size=1)
    assert {each.stage for each in seen} == {1}


def test_a_slow_stage_that_nobody_waits_for_is_none() -> None:
    record = record_of(2, {1: (range(2000, 3000), 2.0)}, weights=(1.0, 0.05), head=0.0, count=3000)
    assert watched(record)[1] == []


def test_what_it_keeps_does_not_grow() -> None:
    found, _ = watched(record_of(2, {}, count=20_000))
    rows = len(found._rows)
    assert rows <= 512
    assert sum(row.seconds.size + row.held.size for row in found._rows) == rows * 16 * 4
    assert not found._parts or sum(part[1].size for part in found._parts) < 1000


def test_a_pipeline_that_lost_a_stage_is_watched_on() -> None:
    found, _ = watched(record_of(3, {}, count=3000))
    found, seen = watched(record_of(2, {1: (range(4000, 5500), 3.0)}, count=6000), found)
    assert {each.stage for each in seen} == {1}
