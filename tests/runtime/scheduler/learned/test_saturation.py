"""Where a stage's prefill speed saturates, told from a few sizes of micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.runtime.core.messages import Span
from gapless.runtime.core.run_record import DecodesRecord, MicroBatchRecord, SegmentRecord
from gapless.runtime.scheduler.learned.saturation import FIRST_SIZE, Saturation

TILE = 16


def tried(seconds: Callable[[int, int], float], longest: int = 4096, stages: int = 2) -> Saturation:
    """Return what is told of stages that take `seconds` for (tokens, stage), where prompts are of `longest` tokens."""
    saturation = Saturation(TILE, stages)
    number = 0
    while not (saturation.is_known or saturation.is_in_vain):
        tokens = min(saturation.offer or FIRST_SIZE, longest)
        saturation.dispatched(tokens)
        micro_batch = MicroBatchRecord(number, 0.0, [SegmentRecord(0, 0, tokens)], DecodesRecord.at())
        for stage in range(stages):
            took = seconds(tokens, stage)
            saturation.observe(micro_batch, [Span(number, stage, 0.0, 0.0, 0.0, took, took)])
        number += 1
    return saturation


@given(flat=st.integers(32, 900), token=st.floats(1e-6, 1e-2), share=st.sampled_from([0.875, 0.95]))
def test_a_roofline_is_seen(flat: int, token: float, share: float) -> None:
    """Weights take as long to read as `flat` tokens to compute: above, the speed is the highest there is."""
    saturation = tried(lambda tokens, stage: token * max(flat, tokens) * (1 + stage))
    found = saturation.tokens_at(share)
    # Between two sizes that are seen, the line lies below the roof.
    assert share * min(flat, 128) <= found <= max(128, 2 * share * flat)
    assert saturation.speed_at(1024) == pytest.approx(1 / (2 * token) * min(1.0, 1024 / flat)), "of the slowest stage"
    assert saturation.speed_at(found) == pytest.approx(share * saturation.speed_at(1024), rel=0.02)


@given(in_flight=st.integers(1, 20), flat=st.integers(32, 900))
def test_micro_batches_in_flight_are_alike(in_flight: int, flat: int) -> None:
    """While a size's speed is awaited it is offered on: short micro-batches behind long ones would wait for them."""
    saturation, offers = Saturation(TILE, 1), list[int]()
    while (offer := saturation.offer) is not None:
        offers.append(offer)
        saturation.dispatched(offer)
        if len(offers) >= in_flight:
            number = len(offers) - in_flight
            tokens = offers[number]
            seconds = 1e-4 * max(flat, tokens)
            micro_batch = MicroBatchRecord(number, 0.0, [SegmentRecord(0, 0, tokens)], DecodesRecord.at())
            saturation.observe(micro_batch, [Span(number, 0, 0.0, 0.0, 0.0, seconds, seconds)])
    runs = [size for size, _ in groupby(offers)]
    assert runs == list(dict.fromkeys(offers)), "no size comes back"
    assert runs in ([256, 128], [256, 128, 512], [256, 128, 512, 1024])


def test_what_rides_along_or_disturbs_now_and_then_does_not_count() -> None:
    calls = iter(range(10_000))

    def seconds(tokens: int, stage: int) -> float:
        return 1e-3 * max(300, tokens) * (3.0 if next(calls) % 7 == 0 else 1.0)

    assert tried(seconds).tokens_at(0.95) == tried(lambda tokens, stage: 1e-3 * max(300, tokens)).tokens_at(0.95)


def test_short_prompts_tell_nothing_of_larger_sizes() -> None:
    saturation = tried(lambda tokens, stage: 1e-3 * tokens, longest=100)
    assert saturation.tokens_at(0.95) == FIRST_SIZE
    assert tried(lambda tokens, stage: 1e-3 * tokens, longest=600).tokens_at(0.95) < FIRST_SIZE
    assert Saturation(TILE, 1).tokens_at(0.95) == FIRST_SIZE, "nothing seen at all"


def test_micro_batches_of_decodes_tell_nothing() -> None:
    saturation = Saturation(TILE, 1)
    micro_batch = MicroBatchRecord(0, 0.0, [SegmentRecord(0, 0, 8)], DecodesRecord.at(range(9), [50] * 9))
    saturation.observe(micro_batch, [Span(0, 0, 0.0, 0.0, 0.0, 1.0, 1.0)])
    assert saturation.speed_at(17) == 0.0


def test_what_is_kept_is_bounded_where_nothing_can_be_told() -> None:
    saturation = Saturation(TILE, 1)
    for number in range(500):
        saturation.dispatched(20)
        micro_batch = MicroBatchRecord(number, 0.0, [SegmentRecord(0, 0, 20)], DecodesRecord.at())
        saturation.observe(micro_batch, [Span(number, 0, 0.0, 0.0, 0.0, 1.0 + number, 1.0 + number)])
    assert saturation.is_in_vain
    assert (saturation._speeds, saturation._seconds) == ({20: 20.0}, {})
