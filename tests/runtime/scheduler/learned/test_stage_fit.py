"""Stage times are learned from what spans say, whatever the noise; no torch."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.runtime.core.features import FEATURES, features
from gapless.runtime.core.run_record import DecodesRecord, MicroBatchRecord, SegmentRecord
from gapless.runtime.scheduler.learned.stage_fit import StageFit
from tests.support.tiers import examples


def random_micro_batch(rng: random.Random) -> MicroBatchRecord:
    chunks = [SegmentRecord(0, 64 * rng.randrange(30), rng.randint(1, 300))] if rng.random() < 0.8 else []
    decodes = [SegmentRecord(i + 1, rng.randrange(2000), 1) for i in range(rng.randint(0 if chunks else 1, 30))]
    return MicroBatchRecord(0, 0.0, chunks, DecodesRecord.of(decodes), sampled_rows=len(decodes))


def test_features_are_those_of_the_micro_batch() -> None:
    micro_batch = MicroBatchRecord(
        0, 0.0, [SegmentRecord(0, 100, 20), SegmentRecord(1, 0, 5)], DecodesRecord.at([2, 3], [9, 49]), sampled_rows=3
    )
    assert dict(zip(FEATURES, features(micro_batch), strict=True)) == {
        "constant": 1,
        "tokens": 27,
        "chunk_prefix": 2000,
        "chunk_squared": 425,
        "decode_context": 60,
        "sampled_rows": 3,
    }


@settings(max_examples=examples(25))
@given(
    weights=st.tuples(*[st.floats(0, high) for high in (5e-3, 1e-3, 5e-7, 5e-7, 1e-6, 1e-4)]),
    stages=st.integers(1, 3),
    seed=st.integers(0, 999),
)
def test_it_predicts_what_it_has_seen(weights: tuple[float, ...], stages: int, seed: int) -> None:
    rng = random.Random(seed)
    fit = StageFit(stages)

    def seconds(micro_batch: MicroBatchRecord, stage: int) -> float:
        return 1e-4 + (1 + 0.3 * stage) * float(np.dot(weights, features(micro_batch)))

    for _ in range(600):
        micro_batch = random_micro_batch(rng)
        for stage in range(stages):
            late = rng.choice([5.0, 10.0]) if rng.random() < 0.05 else 1.0  # what a busy machine does
            fit.observe(features(micro_batch), [stage], [seconds(micro_batch, stage) * rng.gauss(1.0, 0.02) * late])
    errors = []
    for _ in range(100):
        micro_batch = random_micro_batch(rng)
        predicted = fit.predict(features(micro_batch))
        assert predicted is not None
        errors += [abs(p / seconds(micro_batch, stage) - 1) for stage, p in enumerate(predicted)]
    assert np.median(errors) < 0.05
    assert (np.array(fit.weights) >= 0).all()


def test_it_follows_a_stage_that_becomes_slower() -> None:
    rng = random.Random(0)
    fit = StageFit(1)
    for turn in range(5000):
        micro_batch = random_micro_batch(rng)
        fit.observe(features(micro_batch), [0], [(1e-3 + 1e-4 * micro_batch.num_tokens) * (1 if turn < 1000 else 3)])
    micro_batch = MicroBatchRecord(0, 0.0, [SegmentRecord(0, 0, 200)], DecodesRecord.at())
    assert fit.predict(features(micro_batch)) == [pytest.approx(3 * 21e-3, rel=0.1)]


def test_nothing_is_predicted_before_the_first_fit() -> None:
    fit = StageFit(2)
    micro_batch = MicroBatchRecord(0, 0.0, [SegmentRecord(0, 0, 200)], DecodesRecord.at())
    for _ in range(15):
        fit.observe(features(micro_batch), [0], [0.1])
    assert fit.predict(features(micro_batch)) is None
    fit.observe(features(micro_batch), [0], [0.1])  # of stage 1 nothing is known yet
    assert fit.predict(features(micro_batch)) == [pytest.approx(0.1, rel=1e-3), 0.0]


def test_micro_batches_unlike_all_before_are_learned_at_once() -> None:
    """Whole prompts tell nothing of what a prefix costs; the first long prompt must not wait for the next fit."""
    rng = random.Random(0)
    fit = StageFit(1)

    def observe(prefix: int) -> tuple[MicroBatchRecord, float]:
        micro_batch = MicroBatchRecord(
            0, 0.0, [SegmentRecord(0, prefix, rng.randrange(128, 513))], DecodesRecord.at(), sampled_rows=1
        )
        row = features(micro_batch)
        seconds = (3e-3 + 1e-5 * row.tokens + 3e-10 * row.chunk_prefix) * rng.gauss(1.0, 0.03)
        fit.observe(row, [0], [seconds])
        return micro_batch, seconds

    while len(fit._rows) != 1 or fit._num_seen < 600:  # the next fit is far off
        observe(0)
    for turn in range(24):
        micro_batch, seconds = observe(20_000 + 1000 * turn)
    assert fit.predict(features(micro_batch)) == [pytest.approx(seconds, rel=0.15)]
