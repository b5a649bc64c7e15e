"""The bubble ledger: each cause by hand with exact seconds, conservation over random pipelines."""

from __future__ import annotations

import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.runtime.analysis.ledger.causes import CAUSES, Cause
from gapless.runtime.analysis.ledger.lanes import lanes_of, leaving_lane
from gapless.runtime.analysis.ledger.ledger import Ledger
from gapless.runtime.analysis.ledger.live_bubbles import LiveBubbles
from gapless.runtime.core.messages import Span
from gapless.runtime.core.request_record import RequestRecord
from gapless.runtime.core.run_record import DecodesRecord, MicroBatchRecord, RunRecord, SegmentRecord, Wait
from tests.support.idle_intervals import bubble_share, idle_of, idle_share
from tests.support.tiers import calibration, examples


def span(micro_batch: int, stage: int, begin: float, end: float) -> Span:
    return Span(micro_batch, stage, begin, begin, begin, end, end)


def prefill(micro_batch: int, tokens: int, *waits: Wait, request: int = 0) -> MicroBatchRecord:
    return MicroBatchRecord(micro_batch, 0.0, [SegmentRecord(request, 0, tokens)], DecodesRecord.at(), list(waits))


def decode(micro_batch: int, *contexts: int, waits: tuple[Wait, ...] = (), request: int = 0) -> MicroBatchRecord:
    """Decode-only; a context of c means that c KV tokens are attended to."""
    requests = range(request, request + len(contexts))
    return MicroBatchRecord(micro_batch, 0.0, [], DecodesRecord.at(requests, [c - 1 for c in contexts]), list(waits))


def ledger_of(num_stages: int, micro_batches: list[MicroBatchRecord], spans: list[Span], **fields: object) -> Ledger:
    ledger = Ledger(RunRecord(num_stages, 10, micro_batches=micro_batches, spans=spans, **fields))  # type: ignore[arg-type]
    ledger.check()
    return ledger


def idle_seconds(ledger: Ledger, stage: int | None = None) -> dict[str, float]:
    return {str(cause): s for cause, s in ledger.seconds_by_cause(stage).items() if s > 0}


def test_causes_are_the_design_s():
    assert [str(cause) for cause in Cause] == [
        *("pb1_prefill_size", "pb2_prefill_decode", "pb3_decode_context", "stage_imbalance", "transport", "control"),
        "contention",
        *("starved_no_request", "starved_in_flight", "starved_kv_full", "unknown", "recovery", "fill_drain"),
    ]
    assert all(cause.meaning.endswith(".") for cause in Cause)


def test_figure_5():
    """Paper Figure 5: two stages, iteration-level, requests A..D: prefills of A B, of C D (longer), then decodes."""
    micro_batches = [prefill(0, 4), prefill(1, 6), decode(2, 5, 5), decode(3, 7, 7), decode(4, 6, 6)]
    times = [4.0, 6.0, 1.0, 1.5, 1.0]
    micro_batches[2].waits = [Wait(4.0, 8.0, "depth_full")]  # stage 0 is busy with C D all that time
    micro_batches[3].waits = [Wait(10.0, 16.0, "depth_full")]  # C and D decode once their prefill has left stage 1
    micro_batches[4].waits = [Wait(16.0, 17.0, "depth_full")]
    begin0, begin1 = [0.0, 4.0, 10.0, 16.0, 17.5], [4.0, 10.0, 16.0, 17.5, 19.0]
    spans = [span(i, 0, begin0[i], begin0[i] + times[i]) for i in range(5)]
    spans += [span(i, 1, begin1[i], begin1[i] + times[i]) for i in range(5)]
    ledger = ledger_of(2, micro_batches, spans)
    # PB1: stage 1 has A B's prefill done at 8 and gets C D's at 10. PB2: stage 0 has A B's decode done at 11 and waits
    # for C D's prefill to leave stage 1 at 16. PB3: stage 1 has A B's decode done at 17 and gets C D's at 17.5.
    assert idle_seconds(ledger, 0) == {"pb2_prefill_decode": 5.0, "fill_drain": 1.5}
    assert idle_seconds(ledger, 1) == {"pb1_prefill_size": 2.0, "pb3_decode_context": 0.5, "fill_drain": 4.0}
    assert ledger.span_seconds == 20.0
    assert idle_share(ledger) == pytest.approx(13.0 / 40.0)
    assert bubble_share(ledger) == pytest.approx(7.5 / 40.0)


@pytest.mark.parametrize("opened", [None, 2.0])
@pytest.mark.parametrize("closed", [None, 9.0])
def test_a_window_without_requests_at_an_edge_ends_where_it_closed(opened: float | None, closed: float | None) -> None:
    """A server that recorded from 2 to 9 and computed from 4 to 6 was without a request for the rest of that time."""
    micro_batches = [prefill(0, 4)]
    spans = [span(0, 0, 4.0, 5.0), span(0, 1, 5.0, 6.0)]
    ledger = ledger_of(2, micro_batches, spans, window=(opened, closed))
    assert (ledger.t0, ledger.t1) == (opened or 4.0, closed or 6.0)
    assert ledger.span_seconds == ledger.t1 - ledger.t0
    assert ledger.busy_seconds() == 2.0
    without = (ledger.span_seconds - 2.0) * 2
    assert idle_seconds(ledger) == {"fill_drain": 2.0} | ({"starved_no_request": without} if without else {})


PAIRS = [
    (prefill(0, 512), prefill(1, 256), "pb1_prefill_size"),
    (prefill(0, 512), decode(1, 9, 9), "pb2_prefill_decode"),
    (decode(0, 9, 9), prefill(1, 512), "pb2_prefill_decode"),
    (decode(0, 9, 9), decode(1, 9, 8), "pb3_decode_context"),
    (decode(0, 9, 9), decode(1, 10, 8), "stage_imbalance"),  # as long in sum
    (prefill(0, 512), prefill(1, 512), "stage_imbalance"),
]


@pytest.mark.parametrize(("before", "awaited", "cause"), PAIRS)
def test_pair_cause_on_a_later_stage(before: MicroBatchRecord, awaited: MicroBatchRecord, cause: str):
    spans = [span(0, 0, 0, 2), span(1, 0, 2, 7), span(0, 1, 2, 4), span(1, 1, 7.5, 9)]
    ledger = ledger_of(2, [before, awaited], spans)
    assert idle_seconds(ledger, 1) == {cause: 3.0, "transport": 0.5, "fill_drain": 2.0}
    assert idle_seconds(ledger, 0) == {"fill_drain": 2.0}
    assert ledger.bubble_of_micro_batch(1) == 3.5
    assert ledger.bubble_of_micro_batch(0) == 0.0


@pytest.mark.parametrize(("before", "awaited", "cause"), PAIRS)
def test_waiting_for_a_slot_is_the_pair_s_bubble(before: MicroBatchRecord, awaited: MicroBatchRecord, cause: str):
    awaited = MicroBatchRecord(1, 0.0, awaited.chunks, awaited.decodes, [Wait(0.5, 4.0, "depth_full")])
    ledger = ledger_of(1, [before, awaited], [span(0, 0, 0, 1), span(1, 0, 5, 6)])
    assert idle_seconds(ledger) == {cause: 3.0, "control": 1.0}


def test_starved_and_control_on_stage_0():
    waits = (Wait(0.5, 3.0, "in_flight"), Wait(4.0, 5.0, "no_request"), Wait(5.0, 5.5, "kv_full"))
    micro_batches = [prefill(0, 8), prefill(1, 8, *waits)]
    ledger = ledger_of(1, micro_batches, [span(0, 0, 1, 2), span(1, 0, 7, 8)])
    assert idle_seconds(ledger) == {
        "starved_in_flight": 1.0,
        "control": 2.5,
        "starved_no_request": 1.0,
        "starved_kv_full": 0.5,
    }
    assert [(i.start, i.end, str(i.cause), i.micro_batch) for i in idle_of(ledger)] == [
        (2.0, 3.0, "starved_in_flight", 1),
        (3.0, 4.0, "control", 1),
        (4.0, 5.0, "starved_no_request", 1),
        (5.0, 5.5, "starved_kv_full", 1),
        (5.5, 7.0, "control", 1),
    ]
    assert idle_share(ledger) == pytest.approx(5 / 7)
    assert bubble_share(ledger) == pytest.approx(2.5 / 7.0)


def test_a_delay_from_outside_comes_down_the_pipeline():
    micro_batches = [prefill(0, 8), prefill(1, 8, Wait(1.0, 5.0, "no_request"))]
    spans = [span(0, s, 0 + s, 1 + s) for s in range(3)] + [span(1, s, 6 + s, 7 + s) for s in range(3)]
    ledger = ledger_of(3, micro_batches, spans)
    # Stage 0 stood from 1 to 6, starved to 5; the others as long a second and two later, and for the same.
    for stage in range(3):
        assert idle_seconds(ledger, stage) == {"starved_no_request": 4.0, "control": 1.0, "fill_drain": 2.0}
    assert [(i.start, i.end, str(i.cause)) for i in idle_of(ledger) if i.stage == 1 and i.micro_batch == 1] == [
        (2.0, 6.0, "starved_no_request"),
        (6.0, 7.0, "control"),
    ]
    assert ledger.bubble_of_micro_batch(1) == 15.0


@pytest.mark.parametrize(
    ("here", "causes"),
    [
        (
            1.0,
            {"pb1_prefill_size": 1.0, "transport": 0.5, "control": 1.0},
        ),  # micro-batch 1 takes 2 upstream: a second longer
        (2.0, {"transport": 0.5, "control": 1.0}),
        (2.5, {"transport": 0.5, "control": 0.5}),  # half of the delay is made up for here
        (3.5, {}),
    ],
)
def test_what_a_gap_is_longer_than_the_delay_is_the_pair_s(here: float, causes: dict[str, float]):
    """Stage 0 is late for micro-batch 1 by a second; here stage 1 takes some time for micro-batch 0."""
    begin = max(5.5, 2 + here)
    spans = [span(0, 0, 0, 2), span(1, 0, 3, 5), span(0, 1, 2, 2 + here), span(1, 1, begin, begin + 1)]
    ledger = ledger_of(2, [prefill(0, 8), prefill(1, 4)], spans)
    assert idle_seconds(ledger, 1) == causes | {"fill_drain": 2.0}


def test_a_delay_behind_a_wait_for_a_slot():
    """The slot's wait is downstream's own doing and stays where both stages wait; the control after it comes down."""
    micro_batches = [prefill(0, 8), decode(1, 5, waits=(Wait(1.0, 4.0, "depth_full"),)), decode(2, 5)]
    spans = [span(0, 0, 0, 1), span(1, 0, 6, 8), span(0, 1, 1, 3), span(1, 1, 8, 9)]
    ledger = ledger_of(2, micro_batches, spans)
    assert idle_seconds(ledger, 0) == {"pb2_prefill_decode": 3.0, "control": 2.0, "fill_drain": 1.0}
    # Without the control micro-batch 1 had been there at 6: one second of waiting for a slot, two of waiting for it.
    assert idle_seconds(ledger, 1) == {"pb2_prefill_decode": 3.0, "control": 2.0, "fill_drain": 1.0}
    assert [(i.start, i.end, str(i.cause)) for i in idle_of(ledger) if i.stage == 1 and i.micro_batch == 1] == [
        (3.0, 6.0, "pb2_prefill_decode"),
        (6.0, 8.0, "control"),
    ]


def test_a_request_s_bubble_is_the_sum_over_its_micro_batches():
    micro_batches = [prefill(0, 8, request=1), prefill(1, 4, request=2), decode(2, 9, 5, request=1)]
    micro_batches[2].waits = [Wait(2, 4, "in_flight")]
    spans = [span(0, 0, 0, 1), span(1, 0, 1.25, 2), span(2, 0, 4, 5)]
    ledger = ledger_of(1, micro_batches, spans)
    assert ledger.bubble_of_request(1) == 2.0
    assert ledger.bubble_of_request(2) == 2.25
    assert ledger.bubble_of_request(3) == 0.0


def test_the_run_begins_with_the_first_arrival():
    ledger = ledger_of(1, [prefill(0, 8)], [span(0, 0, 5, 6)], requests=[RequestRecord(0, 8, 4.5)])
    assert (ledger.t0, ledger.t1) == (4.5, 6.0)
    assert idle_seconds(ledger) == {"fill_drain": 0.5}


def test_clock_skew_and_a_busy_upstream_stay_within_the_gap():
    micro_batches = [prefill(0, 8), prefill(1, 8)]
    # Stage 1 seems to begin micro-batch 1 before stage 0 ended it, and to be idle while stage 0 was still at
    # micro-batch 0.
    spans = [span(0, 0, 0, 2), span(1, 0, 2, 4), span(0, 1, 0.5, 1.5), span(1, 1, 3, 4)]
    ledger = ledger_of(2, micro_batches, spans)
    assert idle_seconds(ledger, 1) == {"stage_imbalance": 1.5, "fill_drain": 0.5}


def test_a_run_cut_short():
    micro_batches = [prefill(0, 8), prefill(1, 4), prefill(2, 4)]
    spans = [span(0, 0, 0, 1), span(2, 0, 5, 6), span(0, 1, 1, 2), span(1, 1, 3, 4)]  # stage 0's span of 1 is lost
    ledger = ledger_of(3, micro_batches, spans)
    assert idle_seconds(ledger, 0) == {"control": 4.0}
    assert idle_seconds(ledger, 1) == {"pb1_prefill_size": 1.0, "fill_drain": 3.0}
    assert idle_seconds(ledger, 2) == {"fill_drain": 6.0}


def test_fill_does_not_come_down_the_pipeline():
    """Stage 0's span of micro-batch 0 is lost, so that micro-batch 1 is its first."""
    spans = [span(1, 0, 1, 4), span(0, 1, 1, 2), span(1, 1, 4.5, 6)]
    ledger = ledger_of(2, [prefill(0, 8), prefill(1, 4)], spans, requests=[RequestRecord(0, 8, 0.0)])
    assert idle_seconds(ledger, 1) == {"pb1_prefill_size": 2.0, "transport": 0.5, "fill_drain": 1.0}


def test_an_arrival_during_a_wait_for_a_slot_does_not_name_it():
    """With one micro-batch in flight, the awaited one names the wait, wherever in it a request arrives."""
    waits = (Wait(3.0, 4.0, "depth_full"), Wait(4.0, 6.0, "depth_full"))  # a request arrived at 4
    micro_batches = [decode(0, 9), prefill(1, 8), prefill(2, 8, *waits)]
    spans = [span(0, 0, 0, 1), span(0, 1, 1, 2), span(1, 0, 2, 3), span(1, 1, 3, 6), span(2, 0, 6, 7), span(2, 1, 7, 8)]
    assert idle_seconds(ledger_of(2, micro_batches, spans), 0)["stage_imbalance"] == 3.0


def test_the_holder_of_a_slot_left_right_before_the_wait_ended():
    """The coordinator hears of it 0.25 s later, which is long before the next one leaves."""
    micro_batches = [prefill(0, 512), prefill(1, 256), decode(2, 9, waits=(Wait(2.0, 4.25, "depth_full"),))]
    spans = [span(0, 0, 0, 1), span(1, 0, 1, 2), span(2, 0, 4.25, 5)]
    spans += [span(0, 1, 1, 4), span(1, 1, 4, 6), span(2, 1, 6, 7)]
    assert idle_seconds(ledger_of(2, micro_batches, spans), 0) == {"pb1_prefill_size": 2.25, "fill_drain": 2.0}


def test_spans_without_a_record_and_nothing_at_all():
    ledger_of(2, [], [span(0, 1, 0, 1), span(1, 1, 2, 3)])
    empty = ledger_of(2, [], [])
    assert (empty.span_seconds, idle_share(empty), bubble_share(empty), idle_of(empty)) == (0, 0, 0, [])


def test_two_micro_batches_at_once_are_ours_to_break():
    with pytest.raises(AssertionError, match="two micro-batches at once"):
        ledger_of(1, [], [span(0, 0, 0, 2), span(1, 0, 1, 3)])


def test_spans_that_overlap_by_rounding_are_cut_apart():
    ledger = ledger_of(1, [], [span(0, 0, 0, 2), span(1, 0, 2 - 5e-7, 3)])
    assert ledger.lanes[0].begin.tolist() == [0.0, 2.0]
    assert ledger.busy_seconds(0) == 3.0


def test_micro_batches_leave_from_the_last_stage_that_stands():
    spans = [
        span(number, stage, 10 * number + stage, 10 * number + stage + 1) for number in range(3) for stage in range(3)
    ]
    lanes = lanes_of([each for each in spans if (each.micro_batch, each.stage) not in {(1, 2), (2, 2)}], 3)
    leaving = leaving_lane(lanes, [math.inf, math.inf, 5.0])
    assert leaving.micro_batch.tolist() == [0, 1, 2]
    assert leaving.end.tolist() == [3.0, 12.0, 22.0]
    assert leaving_lane(lanes, [math.inf] * 3) is lanes[2]


def test_gaps_before_each_micro_batch():
    waits = (Wait(2, 3, "no_request"),)
    ledger = ledger_of(1, [prefill(0, 8), prefill(1, 8, *waits)], [span(0, 0, 0, 1), span(1, 0, 3.5, 4)])
    seconds, causes = ledger.gaps(0)
    assert seconds.tolist() == [0.0, 2.5]
    assert [CAUSES[c] if c >= 0 else None for c in causes] == [None, Cause.CONTROL]


def test_live_estimate():
    record = RunRecord(2, 100)
    live = LiveBubbles(record)
    assert live.fraction() == 0.0
    record.spans += [span(1, 0, 2, 4), span(0, 0, 1, 2)]  # they come in any order
    assert live.fraction() == 0.0
    record.spans += [span(0, 1, 2, 3), span(1, 1, 4, 6)]
    assert live.fraction() == pytest.approx(1 / 7)  # stage 1 stood one second of its four, stage 0 none of its three
    record.spans.append(span(2, 0, 5, 6))
    assert live.fraction() == pytest.approx(2 / 9)  # stage 0 stood one of its five


def simulate(num_stages: int, depth: int, batches: list[tuple[int, int, list[float], float, str]]) -> RunRecord:
    """Simulate a FIFO pipeline.

    A batch: prefill tokens, decodes, compute per stage, delay before dispatch and its reason.
    """
    record = RunRecord(num_stages, 100)
    free = [0.0] * num_stages
    done: list[float] = []
    clock = 0.0
    for micro_batch, (tokens, decodes, compute, delay, reason) in enumerate(batches):
        row = MicroBatchRecord(micro_batch, 0.0, [SegmentRecord(0, 0, tokens)] if tokens else [], DecodesRecord.at())
        row.decodes = DecodesRecord.of(SegmentRecord(1 + i, 3 * micro_batch + i, 1) for i in range(decodes))
        if len(done) >= depth and done[micro_batch - depth] > clock:
            row.waits.append(Wait(clock, done[micro_batch - depth], "depth_full"))
            clock = done[micro_batch - depth]
        if reason != "control":
            row.waits.append(Wait(clock, clock + delay, reason))  # type: ignore[arg-type]
        clock += delay
        row.dispatched = there = clock
        for stage in range(num_stages):
            begin = max(there, free[stage])
            free[stage] = begin + compute[stage]
            record.spans.append(Span(micro_batch, stage, there, there, begin, free[stage], free[stage]))
            there = free[stage] + 0.01 * compute[-1]
        row.completed = free[-1]
        done.append(free[-1])
        record.micro_batches.append(row)
    return record


seconds = st.one_of(st.just(0.0), st.floats(1e-6, 5.0))


@st.composite
def runs(draw: st.DrawFn) -> RunRecord:
    num_stages, depth = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    compute = st.lists(seconds, min_size=num_stages, max_size=num_stages)
    reason = st.sampled_from(["control", "no_request", "in_flight", "kv_full"])
    batch = st.tuples(st.sampled_from([0, 0, 64, 256]), st.integers(0, 3), compute, seconds, reason)
    record = simulate(num_stages, depth, draw(st.lists(batch, max_size=12)))
    lost = draw(st.sets(st.integers(0, max(0, len(record.spans) - 1)), max_size=3))
    if draw(st.booleans()):
        record.spans = [s for i, s in enumerate(record.spans) if i not in lost]
    skew = [draw(st.floats(-0.5, 0.5)) if draw(st.booleans()) else 0.0 for _ in range(num_stages)]
    record.spans = [span(s.micro_batch, s.stage, s.begin + skew[s.stage], s.end + skew[s.stage]) for s in record.spans]
    return record


@settings(max_examples=examples(300))
@given(runs())
def test_conservation_and_one_cause_per_idle_second(record: RunRecord):
    ledger = Ledger(record)
    ledger.check()
    for stage in range(record.num_stages):
        mine = [(s.begin, s.end) for s in record.spans if s.stage == stage]
        idle = [(i.start, i.end) for i in idle_of(ledger) if i.stage == stage]
        assert all(start < end for start, end in idle)
        covered = sorted(mine + idle)
        at = ledger.t0
        for start, end in covered:  # busy and idle tile the span: no overlap, no hole
            assert start == pytest.approx(at, abs=1e-6)
            at = max(at, end)
        assert at == pytest.approx(ledger.t1, abs=1e-6)
        gap_seconds, causes = ledger.gaps(stage)
        drained = sum(i.seconds for i in idle_of(ledger) if i.stage == stage and i.micro_batch is None)
        assert gap_seconds.sum() + drained == pytest.approx(sum(ledger.seconds_by_cause(stage).values()))
        assert ((gap_seconds > 0) == (causes >= 0)).all()
    inner = sum(i.seconds for i in idle_of(ledger) if i.cause is not Cause.FILL_DRAIN)
    assert sum(ledger.bubble_of_micro_batch(s.micro_batch) for s in record.micro_batches) == pytest.approx(inner)
    assert 0.0 <= bubble_share(ledger) <= 1.0


@settings(max_examples=examples(100))
@given(
    st.integers(2, 5),
    st.lists(st.tuples(seconds, st.sampled_from(["control", "no_request", "in_flight"])), max_size=12),
)
def test_alike_stages_idle_alike(num_stages: int, delays: list[tuple[float, str]]):
    """Where all micro-batches take all stages as long, a delay on stage 0 is told as the same on every stage."""
    record = simulate(num_stages, len(delays) + 1, [(64, 0, [1.0] * num_stages, s, reason) for s, reason in delays])
    record.spans = [
        span(s.micro_batch, s.stage, s.begin - at, s.end - at) for s in record.spans for at in [0.01 * s.stage]
    ]
    ledger = Ledger(record)
    ledger.check()
    for stage in range(1, num_stages):
        for cause, s in ledger.seconds_by_cause(0).items():
            assert ledger.seconds_by_cause(stage)[cause] == pytest.approx(s, abs=1e-6), (stage, cause)


@settings(max_examples=examples(100))
@given(st.integers(1, 4), st.lists(st.floats(0.1, 2.0), min_size=1, max_size=20))
def test_without_delays_only_bubbles_by_imbalance_and_fill_remain(num_stages: int, times: list[float]):
    """Even stages and no waits: what is idle is a pair's bubble, transport or fill, never control or starved."""
    record = simulate(num_stages, len(times), [(64, 0, [t] * num_stages, 0.0, "control") for t in times])
    ledger = Ledger(record)
    ledger.check()
    allowed = {"stage_imbalance", "transport", "fill_drain"}
    assert {cause for cause, s in idle_seconds(ledger).items() if s > 1e-9} <= allowed


def test_it_is_fast():
    count, num_stages = 50_000, 4
    batches = [(256 if i % 3 else 0, 2, [0.01 + 0.002 * (i % 5)] * num_stages, 0.0, "control") for i in range(count)]
    record = simulate(num_stages, num_stages, batches)
    start = time.process_time()
    ledger = Ledger(record)
    ledger.check()
    assert ledger.bubble_of_request(0) > 0
    assert time.process_time() - start < 150 * calibration()
