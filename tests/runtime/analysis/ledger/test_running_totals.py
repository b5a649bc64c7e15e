"""A run that is counted piece by piece has the summary of one that is kept whole, in bounded memory."""

from __future__ import annotations

import random

import numpy as np
import pytest

from gapless.conf.policies import EqualTimeConfig, OrcaBestConfig, SarathiConfig, SchedulerConfig
from gapless.conf.sampling import SamplingParams
from gapless.conf.workloads import SloConfig
from gapless.runtime.analysis.ledger.causes import Cause
from gapless.runtime.analysis.ledger.fleet import Fleet
from gapless.runtime.analysis.ledger.ledger import Ledger
from gapless.runtime.analysis.ledger.quantiles import Quantiles
from gapless.runtime.analysis.ledger.running_ledger import RunningLedger
from gapless.runtime.analysis.ledger.running_totals import RunningTotals
from gapless.runtime.analysis.ledger.summary import summarize
from gapless.runtime.core.block_pool import BlockPool
from gapless.runtime.core.messages import MicroBatchMessage
from gapless.runtime.core.request import Request
from gapless.runtime.core.run_record import RunRecord
from gapless.runtime.engine.coordinator import Coordinator
from gapless.runtime.scheduler import Limits
from gapless.runtime.scheduler.policies import make_scheduler
from tests.support.hand_made import close_to, floor
from tests.support.virtual_pipeline import VirtualPipeline

STAGES, BATCH = 3, 6
SLO = SloConfig(tbt_ms=400)


def seconds(micro_batch: MicroBatchMessage, stage: int) -> float:
    return 0.01 + 1e-3 * micro_batch.num_tokens + 1e-5 * sum(d.start for d in micro_batch.decodes) + 0.002 * stage


def coordinator(policy: SchedulerConfig) -> Coordinator:
    depth = policy.depth(STAGES)
    limits = Limits(batch=BATCH, depth=depth, num_stages=STAGES)
    pool = BlockPool(num_blocks=200, block_size=8)
    pipeline = VirtualPipeline(STAGES, depth.most, 200, 8, seconds, repeats=policy.drafts > 0)
    floors = [floor(), floor(window=30), floor(ranks=1)]
    return Coordinator(pipeline, make_scheduler(policy, limits, pool), floors=floors)


def run(driver: Coordinator, totals: RunningTotals | None, every: int) -> int:
    """Run bursts of requests, with pauses and an abort; return the most micro-batches that the record held."""
    rng = random.Random(3)
    at, most, micro_batches = 0.0, 0, 0
    pending = []
    for number in range(60):
        at += rng.choice([0.0, 0.0, 0.05, 1.0])
        params = SamplingParams(max_tokens=rng.randint(1, 20), ignore_eos=True)
        pending.append(Request(number, [1] * rng.randint(1, 90), params, arrival=at))
    aborted = pending[20]
    while pending or driver.has_work:
        while pending and pending[0].arrival <= driver.clock.now():
            driver.add(pending.pop(0))
        driver.step(pending[0].arrival if pending else driver.clock.now() + 1.0)
        if aborted.num_dispatched:
            driver.abort(aborted)
        micro_batches += 1
        if totals is not None and micro_batches % every == 0:
            totals.take(driver.record)
        most = max(most, len(driver.record.micro_batches))
    return most


POLICIES = [
    SarathiConfig(chunk=24),
    EqualTimeConfig(chunk=24),
    OrcaBestConfig(),
    SarathiConfig(chunk=24, tile=16, drafts=4),
]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_summary_in_pieces(policy: SchedulerConfig) -> None:
    whole = coordinator(policy)
    kept = run(whole, None, 1)
    expected = summarize(Fleet([whole.record]), SLO)
    assert expected.pop("stragglers") == []  # which totals do not look for
    compute = expected.pop("compute")
    assert len(compute) >= 6, "three stages, two phases and more"
    assert (expected["accepted_tokens"] > 0) == (policy.drafts > 0)
    for every in (7, 40):
        driver, totals = coordinator(policy), RunningTotals(policy.depth(STAGES).most, SLO)
        held = run(driver, totals, every)
        found = totals.summary(driver.record)
        assert held < 0.5 * kept
        assert found.keys() == {*expected, "compute"}
        assert found.pop("compute") == close_to(compute)
        for key, value in expected.items():
            # Few gaps lie between two quantiles here: they differ by how one interpolates.
            within = 0.03 if key in ("p90_itl_ms", "p99_itl_ms", "median_itl_ms", "prediction_error") else 1e-6
            close = value if value is None else pytest.approx(value, rel=within, abs=1e-6)
            assert found[key] == close, key


@pytest.mark.parametrize("policy", POLICIES[:3])
def test_seconds_by_stage_and_cause_in_pieces(policy: SchedulerConfig) -> None:
    """They are those of the whole ledger, also where spans of earlier stages come after the last stage's."""
    whole = coordinator(policy)
    run(whole, None, 1)
    expected = Ledger(whole.record)
    for late in (0, 5):
        counted = RunningLedger(policy.depth(STAGES).most)
        record = RunRecord(STAGES, 200, requests=whole.record.requests)
        spans = {number: [] for number in range(len(whole.record.micro_batches) + late + 1)}
        for span in whole.record.spans:
            spans[span.micro_batch + (late if span.stage == 1 else 0)].append(span)
        for number in range(len(spans)):
            record.micro_batches += whole.record.micro_batches[number : number + 1]
            record.spans += spans[number]
            if number % 4 == 0 or number == len(spans) - 1:
                counted.count(record)
                counted.drop(record)
                assert len(record.micro_batches) <= policy.depth(STAGES).most + late + 6
        assert counted.start == expected.t0
        for stage in range(STAGES):
            assert counted.busy[stage] == pytest.approx(expected.busy_seconds(stage))
            assert counted.busy[stage] + counted.idle[stage].sum() == pytest.approx(counted.ends[stage] - counted.start)
            lost = expected.seconds_by_cause(stage)
            lost[Cause.FILL_DRAIN] -= counted.end - counted.ends[stage]
            assert counted.idle[stage] == pytest.approx(list(lost.values()), abs=1e-9)


def test_quantiles_are_within_their_resolution() -> None:
    values = np.random.default_rng(0).lognormal(2.0, 1.5, 20_000)
    sketch = Quantiles()
    for part in np.array_split(values, 7):
        sketch.add(part)
    assert sketch.count == len(values)
    assert sketch.mean == pytest.approx(values.mean())
    assert sketch.std == pytest.approx(values.std())
    for share in (0.01, 0.5, 0.9, 0.99):
        assert sketch.quantile(share) == pytest.approx(np.quantile(values, share), rel=2.5e-3)


def test_nothing_has_a_summary_too() -> None:
    driver = coordinator(SarathiConfig())
    empty = summarize(Fleet([driver.record]))
    del empty["stragglers"]
    found = RunningTotals(STAGES).summary(driver.record)
    assert found == {**empty, "notes": []}
