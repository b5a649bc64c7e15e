"""Blame: what all are charged is what all lose, whatever happens; the rule's numbers by hand, and found slowly."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from gapless.runtime.analysis.ledger.blame import Blame, Charges
from gapless.runtime.analysis.ledger.token_intervals import Part, StagePart, TokenIntervals, stage_part
from gapless.runtime.core.features import FEATURES, features, weigh
from gapless.runtime.core.messages import Span
from gapless.runtime.core.request_record import RequestRecord
from gapless.runtime.core.run_record import DecodesRecord, MicroBatchRecord, RunRecord, SegmentRecord, Wait
from tests.runtime.simulation.pipeline.test_disaggregation import drawn, fleet_of, pools
from tests.runtime.simulation.pipeline.test_drafts import CheapRows, simulate
from tests.runtime.simulation.pipeline.test_faults import fleets, ran
from tests.support.closed_loops import loop
from tests.support.simulated_parts import items, make_replica, run
from tests.support.tiers import examples


def check(record: RunRecord) -> tuple[TokenIntervals, Blame]:
    """Check what holds for the blame of any run, and return it."""
    intervals = TokenIntervals(record)
    blame = Blame(record, intervals)
    waits = [stage_part(part, s) for s in range(record.num_stages) for part in (StagePart.WAIT, StagePart.COMPUTE)]
    others = [Part.QUEUE, Part.NO_ROOM, Part.TURN, *waits]  # what others can have a part in
    for charges, chosen in ((blame.ttft, intervals.is_ttft), (blame.tbt, ~intervals.is_ttft)):
        assert charges.cost.sum() + charges.unrecorded == pytest.approx(charges.lost.sum(), rel=1e-6, abs=1e-9)
        assert (charges.cost >= 0).all()
        most = np.bincount(
            intervals.place[chosen], intervals.table[intervals.row[chosen]][:, others].sum(axis=1), len(charges.lost)
        )
        assert (charges.lost >= 0).all()
        assert (charges.lost <= most + 1e-6).all()
    return intervals, blame


def same(one: Charges, other: Charges) -> None:
    assert one.cost == pytest.approx(other.cost, rel=1e-6, abs=1e-9)
    assert one.lost == pytest.approx(other.lost, rel=1e-6, abs=1e-9)


@settings(max_examples=examples(40))
@given(fleets())
def test_what_is_charged_is_what_is_lost(fleet: dict[str, Any]) -> None:
    for replica in ran(fleet):
        intervals, blame = check(replica.record)
        every = blame.of(np.arange(len(intervals)))
        assert every.cost == pytest.approx(blame.ttft.cost + blame.tbt.cost, rel=1e-6, abs=1e-9)
        assert every.lost == pytest.approx(blame.ttft.lost + blame.tbt.lost, rel=1e-6, abs=1e-9)


@settings(max_examples=examples(10))
@given(drawn())
def test_pools_and_drafts_conserve_it_too(given_: dict[str, Any]) -> None:
    fleet = fleet_of(started := pools(**given_["pools"]))
    assert sum(started.run(items(*given_["requests"]), workload=loop(given_["most"])))
    for record in fleet.records:
        check(record)


def test_drafts_are_charged_for_their_rows() -> None:
    record = simulate("equal_time", CheapRows(), 0.9).record
    _, blame = check(record)
    assert (blame.tbt.cost > 0).all()


def test_a_request_alone_costs_nobody_anything() -> None:
    replica = make_replica("sarathi", layers=(2, 2), dispatch_s=0.002, result_s=0.003)
    assert run(replica, items((70, 40))) == 1
    intervals, blame = check(replica.record)
    assert intervals.seconds.sum() > 0.1
    for charges in (blame.ttft, blame.tbt):
        assert charges.cost == pytest.approx(0.0, abs=1e-12)
        assert charges.lost == pytest.approx(0.0, abs=1e-12)


def slowly(record: RunRecord) -> dict[bool, dict[tuple[int, int], float]]:
    """Compute what each request cost each other, of times to the first token and between tokens, without faults."""
    weights = record.stage_weights
    assert weights is not None
    spans = {(s.micro_batch, s.stage): s for s in record.spans}
    stages = range(record.num_stages)
    costs: dict[int, dict[int, list[float]]] = {}
    for m in record.micro_batches:
        own: dict[int, list[float]] = defaultdict(lambda: [0.0] * record.num_stages)
        ends = m.sampled_rows - len(m.decodes)
        for segment in [*m.chunks, *m.decodes]:
            is_chunk = any(segment is chunk for chunk in m.chunks)
            rows = ends / len(m.chunks) if is_chunk else 1.0
            context = 0.0 if is_chunk else segment.start + 1.0
            prefix, squared = (segment.start * segment.tokens, segment.tokens**2) if is_chunk else (0, 0)
            row = [0.0, segment.tokens, prefix, squared, context, rows]
            for stage in stages:
                own[segment.request][stage] += sum(w * x for w, x in zip(weights[stage], row, strict=True))
        costs[m.micro_batch] = own
        for stage in stages:
            tokens = sum(each[stage] for each in own.values())
            assert tokens + weights[stage][0] == pytest.approx(weigh(weights[stage], features(m)))
    done = [m for m in record.micro_batches if m.completed is not None]
    charged: dict[bool, dict[tuple[int, int], float]] = {True: defaultdict(float), False: defaultdict(float)}
    for request in record.requests:
        at = request.arrival
        for token, end in enumerate(request.token_times):
            charge = charged[token == 0]
            for m in done:
                assert m.completed is not None
                if request.request not in costs[m.micro_batch] or not at < m.completed <= end + 1e-9:
                    continue
                for stage in stages:
                    span, whole = spans[m.micro_batch, stage], weigh(weights[stage], features(m))
                    for other, own_cost in costs[m.micro_batch].items():
                        if other != request.request:
                            seconds = max(0.0, span.end - max(span.begin, at))
                            charge[request.request, other] += seconds * own_cost[stage] / whole
                    waits_from = m.dispatched if stage == 0 else spans[m.micro_batch, stage - 1].end
                    before = [s for s in record.spans if s.stage == stage and s.begin < span.begin]
                    free = max((s.end for s in before), default=0.0)
                    waits_from = max(waits_from, span.input) if span.input < free else waits_from
                    for s in before:
                        seconds = min(s.end, free) - max(s.begin, waits_from, at)
                        split(charge, request.request, costs[s.micro_batch], [stage], seconds)
                for row, oldest in enumerate(done):
                    since = max(oldest.dispatched, done[row - 1].completed or 0.0) if row else oldest.dispatched
                    for wait in (w for each in record.micro_batches for w in each.waits):
                        assert oldest.completed is not None
                        until = min(oldest.completed, m.dispatched, wait.end)
                        seconds = until - max(since, at, wait.start)
                        split(charge, request.request, costs[oldest.micro_batch], stages, seconds)
                at = m.completed
            at = end
    return charged


def split(charge: Any, loser: int, costs: Any, stages: Any, seconds: float) -> None:
    whole = sum(each[stage] for each in costs.values() for stage in stages)
    for other, each in costs.items():
        if seconds > 0:
            charge[loser, other] += seconds * sum(each[stage] for stage in stages) / whole


@settings(max_examples=examples(25))
@given(fleets())
def test_it_is_what_the_rule_gives_slowly(fleet: dict[str, Any]) -> None:
    few = [(1 + prompt % 40, 1 + output % 6, at) for prompt, output, at in fleet["requests"][:6]]
    for replica in ran(fleet | {"requests": few}, faults=[[] for _ in fleet["faults"]]):
        record = replica.record
        record.stage_weights = [[0.001, 2e-5 * (s + 1), 1e-7, 2e-7, 1e-6, 1e-5] for s in range(record.num_stages)]
        assert len(record.stage_weights[0]) == len(FEATURES)
        _, blame = check(record)
        charged = slowly(record)
        for charges, is_ttft in ((blame.ttft, True), (blame.tbt, False)):
            cost, lost = np.zeros(len(record.requests)), np.zeros(len(record.requests))
            place = {r.request: n for n, r in enumerate(record.requests)}
            for (loser, other), seconds in charged[is_ttft].items():
                assert loser != other or seconds < 1e-9, "own time is no blame"
                cost[place[other]] += seconds
                lost[place[loser]] += seconds
            same(charges, Charges(cost, lost, 0.0))


def by_hand() -> RunRecord:
    """Return a run on one stage, whose tokens cost 1 s each, and a micro-batch 2 s.

    Requests 0 and 1 decode; 0 once beside a chunk of 6 tokens of request 2, and once behind the rest of its prompt.
    """
    record = RunRecord(1, 10, stage_weights=[[2.0, 1.0, 0.0, 0.0, 0.0, 0.0]], depth=1)
    record.micro_batches = [
        MicroBatchRecord(0, 0.0, [SegmentRecord(0, 0, 1), SegmentRecord(1, 0, 1)], DecodesRecord.at(), [], 4.0),
        MicroBatchRecord(
            1, 4.0, [SegmentRecord(2, 0, 6)], DecodesRecord.at([0, 1], [1, 1]), [Wait(0.0, 4.0, "depth_full")], 14.0
        ),
        MicroBatchRecord(2, 14.0, [SegmentRecord(2, 6, 3)], DecodesRecord.at(), [Wait(4.0, 14.0, "depth_full")], 19.0),
        MicroBatchRecord(3, 19.0, [], DecodesRecord.at([0], [2]), [Wait(14.0, 19.0, "depth_full")], 22.0),
    ]
    for m in record.micro_batches:
        assert m.completed is not None
        m.sampled_rows = len(m.decodes)
        record.spans.append(Span(m.micro_batch, 0, m.dispatched, m.dispatched, m.dispatched, m.completed, m.completed))
    record.requests = [
        RequestRecord(0, 1, 0.0, [4.0, 14.0, 22.0], user="ann"),
        RequestRecord(1, 1, 0.0, [4.0, 14.0], user="bob"),
        RequestRecord(2, 9, 2.0, [19.0], user="bob"),
    ]
    return record


def test_by_hand() -> None:
    _, blame = check(by_hand())
    # TTFT: 0 and 1 cost each other a second of 4; request 2 waits from 2 to 4 for both, then loses a second to each.
    assert blame.ttft.cost == pytest.approx([1 + 1 + 1, 1 + 1 + 1, 0])
    assert blame.ttft.lost == pytest.approx([1, 1, 4])
    # TBT: beside the chunk each loses 6 s to request 2 and one to the other. Then 0 waits 5 s for the rest of it.
    assert blame.tbt.cost == pytest.approx([1, 1, 6 + 6 + 5])
    assert blame.tbt.lost == pytest.approx([1 + 6 + 5, 1 + 6, 0])


def test_requests_that_the_record_does_not_have_are_charged_together() -> None:
    record = by_hand()
    del record.requests[2]
    _, blame = check(record)
    assert blame.tbt.cost == pytest.approx([1, 1])
    assert blame.tbt.unrecorded == pytest.approx(17)


def test_without_learned_times_a_fit_over_the_run_says_what_tokens_cost() -> None:
    """The device's times are not quite linear; where they are, the fit finds the weights."""
    replica = make_replica("sarathi", layers=(2, 2))
    assert run(replica, items(*[(60, 40, 0.01 * n) for n in range(12)])) == 12
    record = replica.record
    _, fitted = check(record)
    record.stage_weights = [[1e-9, 1.0, 0.0, 0.0, 0.0, 0.0]] * 2
    _, by_tokens = check(record)
    assert fitted.tbt.lost.sum() < by_tokens.tbt.lost.sum(), "the constant part is nobody's"


def test_a_record_without_anything() -> None:
    check(RunRecord(2, 10))
    record = by_hand()
    record.spans.clear()
    _, blame = check(record)
    assert blame.tbt.cost[2] > 0, "waits to be dispatched are known"
