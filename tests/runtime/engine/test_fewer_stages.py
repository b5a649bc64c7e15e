"""A pipeline that loses a stage for good goes on with the others. No torch."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from gapless.conf.errors import ConfigError
from gapless.conf.schema import BenchConfig
from gapless.launch.compose import compose_one
from gapless.runtime.analysis.ledger.causes import Cause
from gapless.runtime.analysis.ledger.ledger import Ledger
from gapless.runtime.analysis.ledger.running_ledger import RunningLedger
from gapless.runtime.analysis.live.live_spans import live_spans
from gapless.runtime.analysis.report.faults_section import fault_lines
from gapless.runtime.analysis.report.run_page import render_report
from gapless.runtime.core.run_record import RunRecord
from gapless.runtime.engine.fewer_stages import plan_fewer_stages
from gapless.runtime.engine.plan import make_plan
from gapless.runtime.scheduler.policies import POLICIES
from tests.runtime.analysis.ledger.test_recovery import in_parts
from tests.runtime.scheduler.test_schedulers import run
from tests.support.idle_intervals import idle_of
from tests.support.written_runs import analysed

STAGES = 4


def shrinking_run(policy: str, seed: int = 0) -> RunRecord:
    """Thirty requests that come over four seconds, while the pipeline loses two of its four stages."""
    rng = random.Random(seed)
    requests = [(rng.randint(1, 60), rng.randint(1, 40), rng.uniform(0, 4), True) for _ in range(30)]
    coordinator, _, served = run(
        policy,
        {
            "block_size": 4,
            "max_len": 120,
            "num_blocks": 200,
            "batch": 4,
            "stages": STAGES,
            "extra_depth": 0,
            "chunk": 32,
            "tile": 16,
            "seed": seed,
            "abort": None,
            "auto": False,
            "order": "fcfs",
            "drafts": 0,
            "requests": requests,
            "faults": [1.5, 4.0],
            "loses_stages": True,
        },
    )
    assert all(request.num_tokens == request.max_len for request in served)
    return coordinator.record


@pytest.mark.parametrize("policy", POLICIES)
def test_the_time_of_a_lost_stage_is_recovery(policy: str) -> None:
    record = shrinking_run(policy)
    assert [fault.stages for fault in record.faults] == [3, 2]
    assert record.standing_stages == 2
    ledger = Ledger(record)
    ledger.check()
    for stage, since in ((2, record.faults[1].since), (3, record.faults[0].since)):
        assert ledger.lanes[stage].end.max(initial=0.0) <= since
        assert ledger.seconds_by_cause(stage)[Cause.RECOVERY] >= ledger.t1 - since
        assert {piece.cause for piece in idle_of(ledger) if piece.stage == stage and piece.start >= since} == {
            Cause.RECOVERY
        }
    assert ledger.seconds_by_cause(1)[Cause.RECOVERY] < 1.0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_counted_in_pieces_it_is_the_same(policy: str, seed: int) -> None:
    record = shrinking_run(policy, seed)
    expected = Ledger(record)
    counted, kept = RunningLedger(STAGES), 0
    for part in in_parts(record, random.Random(seed)):
        if (new := counted.count(part)) is not None:
            shown = live_spans(*new)  # for the live page
            for lane, begin, end in zip(new[0].lanes, shown.begin, shown.end, strict=True):
                assert len(begin) == len(end) == len(shown.prefill)
                assert len(lane.begin) or begin == end
        counted.drop(part)
        kept = len(part.micro_batches)
    assert kept < len(record.micro_batches)
    for stage in range(STAGES):
        assert counted.busy[stage] == pytest.approx(expected.busy_seconds(stage))
        idle = expected.seconds_by_cause(stage)
        idle[Cause.FILL_DRAIN] -= counted.end - counted.ends[stage]
        assert counted.idle[stage] == pytest.approx(list(idle.values()), abs=1e-9)


def test_the_report_says_how_many_stages_are_left() -> None:
    record = shrinking_run("sarathi")
    run = analysed(record, {})
    assert [fault["stages"] for fault in run.summary["faults"]] == [3, 2]
    assert "with 3 stages from then on" in fault_lines(run.summary)[0]
    assert " with 2 stages from then on</td>" in render_report(run)


def config_of(*overrides: str) -> BenchConfig:
    return compose_one(["model=tiny", "parallel=pp2", *overrides], BenchConfig, "bench")


def test_the_layers_are_split_anew() -> None:
    config = config_of("parallel.layers=[3,1]", "cache.num_blocks=64")
    plan = make_plan(config)
    smaller, new = plan_fewer_stages(config, plan, 1)
    assert [len(layers) for layers in plan.layers] == [3, 1]
    assert [len(layers) for layers in new.layers] == [4]
    assert (smaller.parallel.pp, new.limits.num_stages, new.num_blocks) == (1, 1, plan.num_blocks)


def test_what_was_accepted_must_still_fit() -> None:
    config = config_of("cache.num_blocks=64")
    plan = make_plan(config)
    with pytest.raises(ConfigError, match=r"requests of at most 64 tokens, but requests of up to \d+ were accepted"):
        plan_fewer_stages(replace(config, cache=replace(config.cache, num_blocks=4)), plan, 1)
    with pytest.raises(ConfigError, match="memory"):
        plan_fewer_stages(replace(config, hardware=replace(config.hardware, memory_gib=1e-4)), plan, 1)
