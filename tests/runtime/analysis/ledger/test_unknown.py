"""The cause of what another engine's trace does not say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.runtime.analysis.ledger.causes import BUBBLES, STARVED, Cause
from gapless.runtime.analysis.ledger.fleet import Fleet
from gapless.runtime.analysis.ledger.ledger import Ledger
from gapless.runtime.analysis.ledger.summary import summarize
from gapless.runtime.core.messages import Span
from gapless.runtime.core.run_record import DecodesRecord, MicroBatchRecord, RunRecord, SegmentRecord, Unknown, Wait
from tests.support.idle_intervals import bubble_share, idle_of


def two_stages(times: list[tuple[float, float]], waits: list[list[Wait]], unknown: list[Unknown]) -> RunRecord:
    """Micro-batches of one token each, one after the other on both stages; `times` are their seconds there."""
    record = RunRecord(2, 0, unknown=unknown)
    free = [0.0, 0.0]
    for number, (first, second) in enumerate(times):
        begin = max([free[0], *(wait.end for wait in waits[number])])
        chunks = [] if "tokens" in unknown else [SegmentRecord(-1, 0, 1)]
        record.micro_batches.append(MicroBatchRecord(number, begin, chunks, DecodesRecord.at(), waits[number]))
        record.spans.append(Span(number, 0, free[0], begin, begin, begin + first, begin + first))
        on = max(begin + first, free[1])
        record.spans.append(Span(number, 1, free[1], on, on, on + second, on + second))
        free = [begin + first, on + second]
    return record


def test_an_unknown_wait_comes_down_the_pipeline() -> None:
    waits = [[], [Wait(1.0, 4.0, "unknown")], [Wait(5.0, 6.5, "send"), Wait(6.5, 7.0, "unknown")]]
    ledger = Ledger(two_stages([(1.0, 1.0)] * 3, waits, ["requests"]))
    ledger.check()
    assert ledger.seconds_by_cause(0)[Cause.UNKNOWN] == pytest.approx(3.5)
    assert ledger.seconds_by_cause(0)[Cause.TRANSPORT] == pytest.approx(1.5)
    assert ledger.seconds_by_cause(1)[Cause.UNKNOWN] == pytest.approx(3.5)


def test_unknown_is_neither_a_bubble_nor_starved() -> None:
    assert Cause.UNKNOWN not in (*BUBBLES, *STARVED)
    ledger = Ledger(two_stages([(1.0, 1.0)] * 2, [[], [Wait(1.0, 4.0, "unknown")]], []))
    assert bubble_share(ledger) == 0.0


seconds = st.integers(1, 40).map(lambda count: count / 8)


@given(st.lists(st.tuples(seconds, seconds), min_size=1, max_size=12))
def test_without_tokens_times_tell_what_is_alike(times: list[tuple[float, float]]) -> None:
    """A wait for a micro-batch is imbalance if it took the first stage as long as the last one did.

    Other waits are unknown.
    """
    ledger = Ledger(two_stages(times, [[] for _ in times], ["tokens"]))
    ledger.check()
    for idle in idle_of(ledger):
        if idle.cause in (Cause.FILL_DRAIN, Cause.TRANSPORT):
            continue
        assert idle.stage == 1
        assert idle.micro_batch is not None
        was, now = times[idle.micro_batch - 1][0], times[idle.micro_batch][0]
        is_alike = abs(was - now) <= 0.1 * max(was, now)
        assert idle.cause == (Cause.STAGE_IMBALANCE if is_alike else Cause.UNKNOWN)


def test_a_summary_lacks_what_is_unknown() -> None:
    record = two_stages([(1.0, 1.0)], [[]], ["requests", "kv", "tokens"])
    found = summarize(Fleet([record]))
    assert found["unknown"] == ["requests", "kv", "tokens"]
    whole = summarize(Fleet([two_stages([(1.0, 1.0)], [[]], [])]))
    absent = whole.keys() - found.keys()
    assert {"completed", "p99_itl_ms", "peak_kv_fraction", "mean_tokens_per_micro_batch", "preemptions"} <= absent
    assert {"duration", "bubble_seconds", "stage_busy_fraction", "micro_batches"} <= found.keys()
