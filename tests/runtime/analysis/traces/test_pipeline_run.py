"""Ranks' traces as one run: waits and transfers are split exactly, and no second is lost."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.conf.errors import ConfigError
from gapless.runtime.analysis.explain.analysed_run import AnalysedRun
from gapless.runtime.analysis.explain.roots import Root
from gapless.runtime.analysis.explain.span_replay import replayed_spans
from gapless.runtime.analysis.ledger.causes import Cause
from gapless.runtime.analysis.ledger.ledger import Ledger
from gapless.runtime.analysis.run_folder.run_info import RunInfo
from gapless.runtime.analysis.run_folder.spans_csv import span_rows
from gapless.runtime.analysis.traces.pipeline_run import run_of_traces
from gapless.runtime.analysis.traces.rank_trace import RankTrace, Step, Transfer, merged, seconds_within, without

from .synthetic import MicroBatch, micro_batches, ranks_of, two_ranks


@given(micro_batches)
def test_receives_are_split_in_wait_and_transfer(work: list[MicroBatch]) -> None:
    traces, handovers = two_ranks(work)
    run = run_of_traces(traces)
    found = run.transfers[1]
    assert [pair.wait for pair in found] == pytest.approx([each.wait for each in handovers], abs=1e-9)
    assert [pair.transfer for pair in found] == pytest.approx([each.transfer for each in handovers], abs=1e-9)
    stood = [max(0.0, each.received_from - each.sent_from) for each in handovers]
    assert [pair.sender_wait for pair in found] == pytest.approx(stood, abs=1e-9)


@given(micro_batches)
def test_every_second_has_a_cause_and_compute_is_the_traces(work: list[MicroBatch]) -> None:
    traces, _ = two_ranks(work)
    ledger = Ledger(run_of_traces(traces).record)
    ledger.check()
    assert ledger.busy_seconds(0) == pytest.approx(sum(one.first for one in work))
    assert ledger.busy_seconds(1) == pytest.approx(sum(one.second for one in work))


@given(micro_batches)
def test_where_all_is_decodes_nothing_is_unknown(work: list[MicroBatch]) -> None:
    """Once the last micro-batch has left, decodes are admissible, and the engine alone is late; before, they wait."""
    traces, _ = two_ranks([replace(one, prefill=0) for one in work])
    assert Ledger(run_of_traces(traces).record).seconds_by_cause()[Cause.UNKNOWN] == 0.0


@given(micro_batches, st.integers(0, 3), st.integers(0, 3))
def test_traces_that_begin_and_end_apart_are_aligned(work: list[MicroBatch], head: int, tail: int) -> None:
    work = work * (1 + 10 // len(work))
    traces, handovers = two_ranks(work)
    first, second = traces
    kept = range(head, len(work) - tail)  # rank 1's profiler began later and stopped earlier
    second.steps, second.receives = [second.steps[i] for i in kept], [second.receives[i] for i in kept]
    run = run_of_traces([first, second])
    assert len(run.record.micro_batches) == len(kept)
    assert [pair.wait for pair in run.transfers[1]] == pytest.approx([handovers[i].wait for i in kept], abs=1e-9)
    assert any("left out" in note for note in run.record.notes) == bool(head + tail)


@given(micro_batches)
def test_without_steps_micro_batches_are_told_apart_by_transfers(work: list[MicroBatch]) -> None:
    traces, handovers = two_ranks(work)
    bare = [replace(trace, steps=[], stage=None) for trace in traces]
    run = run_of_traces(bare)
    assert run.record.unknown == ["requests", "kv", "queue", "tokens"]
    assert [pair.wait for pair in run.transfers[1]] == pytest.approx([each.wait for each in handovers], abs=1e-9)
    ledger = Ledger(run.record)
    ledger.check()
    named = {cause for cause, seconds in ledger.seconds_by_cause().items() if seconds > 1e-9}
    assert named <= {Cause.STAGE_IMBALANCE, Cause.TRANSPORT, Cause.UNKNOWN, Cause.FILL_DRAIN}


def test_a_slower_first_stage_is_imbalance_where_nothing_is_known_of_micro_batches() -> None:
    traces, _ = two_ranks([MicroBatch(0.06, 0.02, 0.001, 0.0, 8, 1)] * 20)
    ledger = Ledger(run_of_traces([replace(trace, steps=[]) for trace in traces]).record)
    idle = ledger.seconds_by_cause(1)
    assert idle[Cause.STAGE_IMBALANCE] == pytest.approx(19 * 0.04, rel=0.05)
    assert idle[Cause.UNKNOWN] == 0.0


@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize("is_bare", [False, True])
def test_a_slow_stage_is_named_first(slow: int, is_bare: bool) -> None:
    """It is, with steps that say their tokens or without them, and whether prompts take part or not."""
    long, short = MicroBatch(0.06, 0.03, 0.001, 0.0, 64, 4), MicroBatch(0.02, 0.01, 0.001, 0.0, 0, 4)
    work = [long, *[short] * 4] * 12 if not is_bare else [short] * 60
    work = work if slow == 0 else [replace(one, first=one.second, second=one.first) for one in work]
    traces, _ = two_ranks(work)
    run = run_of_traces([replace(trace, steps=[], stage=None) for trace in traces] if is_bare else traces)
    first = AnalysedRun.of(run.record, RunInfo({}, title="imported")).words[0]
    assert first.startswith(f"A slow stage {slow} (2x the other stages' time) costs ")


@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize("is_bare", [False, True])
@pytest.mark.parametrize(("every", "late"), [(1, 0.005), (3, 0.0)])
def test_a_slow_stage_is_named_first_where_dispatch_is_late_or_few_are_slow(
    every: int, late: float, slow: int, is_bare: bool
) -> None:
    work = []
    for number in range(60):
        own = 0.04 if number % every == 0 else 0.02
        first, second = (own, 0.02) if slow == 0 else (0.02, own)
        work.append(MicroBatch(first, second, 0.001, late, 64 * (number % 2), 4))
    traces, _ = two_ranks(work)
    run = run_of_traces([replace(trace, steps=[], stage=None) for trace in traces] if is_bare else traces)
    first_sentence = AnalysedRun.of(run.record, RunInfo({}, title="imported")).words[0]
    assert first_sentence.startswith(f"A slow stage {slow} ({1.3 if every > 1 else 2}x the other stages' time) costs ")


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize(("transfer", "late"), [(0.001, 0.0), (0.001, 0.003), (0.01, 0.003)])
@pytest.mark.parametrize(("ratio", "every"), [(1.3, 1), (2.0, 1), (2.0, 3)])
@pytest.mark.parametrize(
    ("stages", "slow", "is_async"),
    [
        (2, 0, False),
        (2, 1, False),
        (4, 0, False),
        (4, 2, False),
        (2, 0, True),
        (2, 1, True),
        (4, 1, True),
        (4, 3, True),
    ],
)
def test_a_slow_stage_has_its_size(
    stages: int, slow: int, is_async: bool, ratio: float, every: int, transfer: float, late: float, noise: float
) -> None:
    """Its size is what the run is longer than with stages alike, whether sends wait for their receiver or not."""
    draw = np.random.default_rng(0)
    prefill = [64 * (number % 4 == 0) for number in range(120)]
    content = np.array([0.03 if tokens else 0.02 for tokens in prefill])
    alike = content * draw.lognormal(0.0, noise, (stages, len(content)))
    planted = alike.copy()
    planted[slow, ::every] *= ratio
    depth = stages if is_async else 0
    kinds = {"transfer": transfer, "late": late, "depth": depth, "is_async": is_async}
    ledger, healthy = (
        Ledger(run_of_traces(ranks_of(seconds.tolist(), prefill, **kinds)).record) for seconds in (planted, alike)
    )
    truth = ledger.span_seconds - healthy.span_seconds
    if truth < 0.07 * ledger.span_seconds:  # beside what links cost
        return
    record = run_of_traces(ranks_of(planted.tolist(), prefill, **kinds)).record
    found = replayed_spans(record, ledger)
    (size,) = (each for each in found if each.cause == Root.SLOW_STAGE)
    assert size.stage == slow
    assert size.seconds == pytest.approx(truth, rel=0.1)
    assert {each.cause for each in found[: found.index(size)]} <= {Root.TRANSPORT}


def test_uneven_micro_batches_of_which_nothing_is_known_are_unknown() -> None:
    short, long = MicroBatch(0.01, 0.01, 0.001, 0.0, 8, 1), MicroBatch(0.05, 0.05, 0.001, 0.0, 40, 1)
    traces, _ = two_ranks([short, long] * 10)
    idle = Ledger(run_of_traces([replace(trace, steps=[]) for trace in traces]).record).seconds_by_cause(1)
    known = Ledger(run_of_traces(traces).record).seconds_by_cause(1)
    assert idle[Cause.UNKNOWN] == pytest.approx(known[Cause.PB1_PREFILL_SIZE])
    assert idle[Cause.UNKNOWN] > 0.3


def test_decodes_of_unknown_context_are_pb3_where_they_took_another_time() -> None:
    short, long = MicroBatch(0.01, 0.01, 0.001, 0.0, 0, 2), MicroBatch(0.05, 0.05, 0.001, 0.0, 0, 6)
    traces, _ = two_ranks([short, long] * 10)
    for trace in traces:
        trace.steps = [replace(step, decode_context=None) for step in trace.steps]
    record = run_of_traces(traces).record
    idle = Ledger(record).seconds_by_cause(1)
    assert record.unknown == ["requests", "kv", "queue", "context"]
    assert idle[Cause.PB3_DECODE_CONTEXT] > 0.3
    assert idle[Cause.STAGE_IMBALANCE] == idle[Cause.UNKNOWN] == 0.0


def test_spans_leave_empty_what_is_unknown() -> None:
    traces, _ = two_ranks([MicroBatch(0.01, 0.01, 0.001, 0.0, 8, 2)] * 2)
    unlabelled = [replace(trace, steps=[]) for trace in traces]
    no_context = [replace(t, steps=[replace(s, decode_context=None) for s in t.steps]) for t in traces]
    for given_traces, counts in ((traces, "8,2,9,0"), (no_context, "8,2,,0"), (unlabelled, ",,,")):
        record = run_of_traces(given_traces).record
        row = b"".join(span_rows(record, Ledger(record))).decode().splitlines()[1]
        assert ",".join(row.split(",")[8:12]) == counts


def test_prompts_that_come_when_nothing_is_in_flight_may_be_late_or_new() -> None:
    one = MicroBatch(0.01, 0.01, 0.001, 0.5, 32, 1)
    traces, _ = two_ranks([one] * 3)
    for trace in traces:
        trace.steps = [replace(step, decode_requests=0, decode_tokens=0) for step in trace.steps]
    record = run_of_traces(traces).record
    idle = Ledger(record).seconds_by_cause(0)
    assert idle[Cause.UNKNOWN] == pytest.approx(2 * 0.5, rel=0.05)
    assert any("does not show which" in note for note in record.notes)


def test_a_lazy_send_does_not_hold_the_first_stage() -> None:
    """A send that the rank waits for only before its next one is over when the receiver has it."""
    traces, _ = two_ranks([MicroBatch(0.02, 0.01, 0.001, 0.1, 8, 1)] * 4)
    sends = traces[0].sends
    traces[0].sends = [replace(s, end=n.start) for s, n in zip(sends, [*sends[1:], sends[-1]], strict=True)]
    idle = Ledger(run_of_traces(traces).record).seconds_by_cause(0)
    assert idle[Cause.TRANSPORT] < 0.01 < 0.26 < idle[Cause.CONTROL]


def test_one_rank_of_a_stage_stands_for_its_tensor_parallel_ranks() -> None:
    (first, second), _ = two_ranks([MicroBatch(0.02, 0.01, 0.001, 0.0, 8, 1)] * 4)
    beside = [replace(first, rank=2, tensor_rank=1), replace(second, rank=3, tensor_rank=1)]
    record = run_of_traces([*beside, first, second]).record
    assert record.num_stages == 2
    assert len(record.spans) == 8
    assert "One rank represents each stage: 0, 1. The other 2 are left out." in record.notes


def test_stages_are_read_off_who_sends_to_whom() -> None:
    (first, second), _ = two_ranks([MicroBatch(0.02, 0.01, 0.001, 0.0, 8, 1)] * 4)
    first = replace(first, stage=None, rank=4, sends=[replace(s, peer=6) for s in first.sends])
    record = run_of_traces([replace(second, stage=None, rank=6), first]).record
    assert record.num_stages == 2
    assert record.spans[0].begin < record.spans[1].begin


@pytest.mark.parametrize(
    ("traces", "line"),
    [
        ([], "no trace of a rank"),
        ([RankTrace("a", 0, 0)], "a: rank 0 has no micro-batch: neither steps nor compute"),
        ([RankTrace("a", 0, 1)], "no trace of stage 0, but one of stage 1; give those of all stages"),
    ],
)
def test_what_makes_no_run(traces: list[RankTrace], line: str) -> None:
    with pytest.raises(ConfigError) as error:
        run_of_traces(traces)
    assert str(error.value) == line


def test_empty_steps_are_no_micro_batches() -> None:
    trace = RankTrace("a", 0, 0, steps=[Step(0.0, 1.0, "x", 0, 0, 0, 0, 0), Step(2.0, 3.0, "y", 1, 4, 0, 0, 0)])
    trace.computes = merged([0.0, 2.0], [1.0, 3.0])
    record = run_of_traces([trace]).record
    assert [m.prefill_tokens for m in record.micro_batches] == [4]


intervals = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)), max_size=12)


@given(intervals, intervals)
def test_unions_and_differences_of_intervals(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    def instants(parts: list[tuple[int, int]]) -> set[int]:
        return {at for start, length in parts for at in range(start, start + length)}

    def union(parts: list[tuple[int, int]]) -> np.ndarray:
        return merged([float(start) for start, _ in parts], [float(start + length) for start, length in parts])

    def covered(found: np.ndarray) -> set[int]:
        return {at for start, end in found for at in range(int(start), int(end))}

    a, b = union(one), union(other)
    assert covered(a) == instants(one)
    assert (np.diff(a.ravel()) > 0).all()
    assert covered(without(a, b)) == instants(one) - instants(other)
    window = seconds_within(a, np.array([5.0]), np.array([40.0]))
    assert window[0] == len(instants(one) & set(range(5, 40)))


def test_the_wait_lies_within_the_receive() -> None:
    from gapless.runtime.analysis.traces.matching import MatchedTransfer

    late_send = MatchedTransfer(Transfer(9.0, 9.5), Transfer(1.0, 2.0))  # clocks that disagree by seconds
    assert (late_send.wait, late_send.transfer, late_send.sender_wait) == (1.0, 0.0, 0.0)
