"""The worst moments: what was planted is found and named, a steady run has none, and no two are the same one."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
from hypothesis import given, settings

from gapless.runtime.analysis.ledger.blame import Blame
from gapless.runtime.analysis.ledger.ledger import Ledger
from gapless.runtime.analysis.ledger.moments import Moment, worst_moments
from gapless.runtime.core.run_record import RunRecord
from gapless.runtime.simulation.pipeline.faults import RankFault
from tests.runtime.simulation.pipeline.test_faults import TIMES, fleets, ran
from tests.support.simulated_parts import items, make_replica, run
from tests.support.tiers import examples


def moments_of(record: RunRecord, count: int = 10) -> list[Moment]:
    ledger = Ledger(record)
    blame = Blame.of_run(record, ledger)
    return worst_moments(ledger, blame.intervals, blame, count)


def test_a_whole_long_prompt_among_decodes_is_the_worst_moment() -> None:
    replica = make_replica("orca_best", layers=(2, 2), batch=4)
    assert run(replica, items((4, 60), (4, 60), (110, 2, 0.05))) == 3
    record = replica.record
    worst = moments_of(record)[0]
    prefill = next(m for m in record.micro_batches if any(c.request == 2 for c in m.chunks))
    assert prefill.completed is not None
    assert worst.start < prefill.completed <= worst.end + 1e-9
    assert worst.kind == "tbt"
    assert worst.cause in ("compute", "wait")
    assert worst.seconds >= 2 * worst.typical
    assert worst.blamed[0][0] == 2
    assert worst.requests >= 2


def test_a_fault_is_named() -> None:
    faults = [RankFault(0.1, 1, False)]
    replica = make_replica("sarathi", layers=(2, 2), faults=faults, times=TIMES)
    assert run(replica, items((20, 40), (20, 40))) == 2
    worst = moments_of(replica.record)[0]
    assert (worst.kind, worst.cause, worst.requests) == ("tbt", "recovery", 2)
    assert worst.start <= replica.record.faults[0].since <= worst.end


def test_equal_decodes_have_no_worst_moment() -> None:
    replica = make_replica("sarathi", layers=(2, 2), batch=2, depth=2)
    assert run(replica, items((8, 30), (8, 30))) == 2
    assert [moment for moment in moments_of(replica.record) if moment.kind != "stall"] == []
    assert moments_of(RunRecord(2, 10)) == []


@settings(max_examples=examples(25))
@given(fleets())
def test_moments_are_apart_and_within_the_run(fleet: dict[str, Any]) -> None:
    for replica in ran(fleet):
        record, ledger = replica.record, Ledger(replica.record)
        found = moments_of(record, 5)
        assert len(found) <= 5
        for moment in found:
            assert ledger.t0 - 1e-9 <= moment.start < moment.end
            assert moment.seconds >= 2 * moment.typical * (1 - 1e-9)
            assert 0 <= moment.requests <= len(record.requests)
            cost = [seconds for _, seconds in moment.blamed]
            assert cost == sorted(cost, reverse=True)
            assert np.isfinite(moment.excess)
        for one, other in combinations(found, 2):
            overlap = min(one.end, other.end) - max(one.start, other.start)
            assert one.kind != other.kind or overlap < 0.5 * min(one.seconds, other.seconds)
