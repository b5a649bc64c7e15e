"""Runs that were slowed in one known way each: the first cause names it, and costs what the run without it saves."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache, partial
from itertools import cycle

import msgspec
import pytest

from gapless.conf.build import to_mapping
from gapless.conf.schema import SimulateConfig
from gapless.launch.compose import compose_one
from gapless.launch.turns import requests
from gapless.runtime.analysis.explain.analysed_run import AnalysedRun
from gapless.runtime.analysis.explain.explain_run import quick_explanation
from gapless.runtime.analysis.explain.explanation import METRICS
from gapless.runtime.analysis.explain.replayed_causes import replayed_causes
from gapless.runtime.analysis.explain.roots import Root
from gapless.runtime.analysis.explain.sized_cause import COMPUTE
from gapless.runtime.analysis.explain.twin import twin_of
from gapless.runtime.analysis.explain.what_if import WhatIf
from gapless.runtime.analysis.explain.without import twins_without
from gapless.runtime.analysis.ledger.causes import Cause
from gapless.runtime.analysis.ledger.ledger import Ledger
from gapless.runtime.analysis.run_folder.run_info import RunInfo
from gapless.runtime.core.run_record import RunRecord
from gapless.runtime.simulation.pipeline.run import simulated
from gapless.runtime.simulation.pipeline.setting import make_setting
from tests.support.written_runs import analysed

SMALL = ("model=llama-13b", "hardware=a100-80g", "parallel=pp2", "workload=zipf", "workload.num_prompts=40")
SARATHI = "scheduler=sarathi"
SLOW_LINK = ("cluster=ethernet-25g", "cluster.devices_per_node=1", "cluster.network.gigabytes_per_s=0.05")
NEAR_LINK = ("cluster=ethernet-25g", "cluster.devices_per_node=1")
EVEN = "parallel.layers=[20,20]"
DEEP = ("model=llama-33b", "parallel=pp4", "workload.num_prompts=60", SARATHI)
FEW = "workload.num_prompts=16"


@cache
def run_of(*overrides: str) -> tuple[RunRecord, SimulateConfig]:
    config = compose_one([*SMALL, *overrides], SimulateConfig, "simulate")
    setting = make_setting(config)
    workload, _ = requests(config, {config.scheduler: setting.plan})
    return simulated(setting, workload)[0].record, config


def explained(*overrides: str) -> AnalysedRun:
    record, config = run_of(*overrides)
    return AnalysedRun.of(record, RunInfo(to_mapping(config)), partial(quick_explanation, seconds=20.0))


@pytest.mark.parametrize(
    ("planted", "control", "root", "stage", "says"),
    [
        (("parallel.layers=[26,14]",), (), Root.UNEVEN_LAYERS, 0, "Uneven layers on stage 0 (26 of 40) cost "),
        ((EVEN, "simulation.devices=[a100-80g,a6000]"), (EVEN,), Root.SLOW_STAGE, 1, "A slow stage 1 (2"),
        (SLOW_LINK, NEAR_LINK, Root.TRANSPORT, 0, "Slow links, mostly after stage 0 (0.04"),
        (
            (SARATHI, "scheduler.chunk=32"),
            (SARATHI, "scheduler.chunk=256"),
            Root.SMALL_CHUNK,
            None,
            "Small chunks (32 ",
        ),
        ((*DEEP, "scheduler.chunk=4096"), (*DEEP, "scheduler.chunk=256"), Root.LARGE_CHUNK, None, "Large chunks ("),
        (
            ("workload.max_concurrency=2", FEW),
            (FEW,),
            Root.FEW_REQUESTS,
            None,
            "Few concurrent requests (at most 2 unfinished) cost ",
        ),
        (("cache.num_blocks=420",), (), None, None, "A small KV cache (420 blocks"),
        (
            ("simulation.straggler_rate=0.1", "simulation.straggler_factor=4"),
            (),
            Root.CHANCE,
            None,
            "Stage-time jitter costs ",
        ),
        (("scheduler=prefill_first",), (), Root.POLICY, None, "The scheduling policy (prefill_first) costs "),
        (("parallel.depth=1",), (), Root.DEPTH, None, "Few micro-batches in flight (at most 1) cost "),
        (("simulation.dispatch_ms=30",), (), Root.CONTROL, None, "Coordinator overhead costs "),
    ],
)
def test_a_cause_costs_what_the_run_without_it_saves(
    planted: tuple[str, ...], control: tuple[str, ...], root: Root | None, stage: int | None, says: str
) -> None:
    run = explained(*planted)
    first = run.causes[0]
    assert root in (None, first.cause), run.words
    assert stage in (None, first.stage)
    assert run.words[0].startswith(says), run.words
    truth = run.ledger.span_seconds - Ledger(run_of(*control)[0]).span_seconds
    assert first.seconds == pytest.approx(truth, rel=0.05)
    assert first.low <= first.seconds <= first.high


def test_what_shows_a_cause_adds_up_to_what_it_costs() -> None:
    run = explained("parallel.layers=[26,14]")
    first, idle = run.causes[0], run.ledger.seconds_by_cause()
    assert sum(first.shows.values()) == pytest.approx(first.seconds * run.ledger.num_stages)
    assert all(seconds <= idle[Cause(name)] for name, seconds in first.shows.items() if name != COMPUTE)
    assert first.change == "layers=[20,20]"
    assert first.saves_seconds == pytest.approx(first.seconds)


@pytest.mark.parametrize("keys", [(), ("workload.request_rate=0.3",), ("workload.num_prompts=1",), ("parallel=pp1",)])
def test_a_healthy_run_has_no_cause(keys: tuple[str, ...]) -> None:
    run = explained(*keys)
    assert run.causes == ()
    (only,) = run.words
    assert only.startswith("No cause worth fixing: ")
    assert run.summary["causes"] == []


def test_a_real_run_s_cause_costs_more_than_its_replay_is_off() -> None:
    record, config = run_of("parallel.layers=[26,14]")
    recorded = {key: value for key, value in to_mapping(config).items() if key != "simulation"}
    twin = twin_of(record, Ledger(record), recorded)
    assert twin.is_real
    what_if, ways = WhatIf(twin), twins_without(twin)
    for off, roots in ((0.01, [Root.UNEVEN_LAYERS]), (-0.5, [])):
        error = dict.fromkeys(METRICS, off)
        found = replayed_causes(what_if, ways, twin, "duration", error, math.inf)
        assert [each.cause for each in found.causes][:1] == roots


def test_a_short_budget_says_what_was_left() -> None:
    record, config = run_of("scheduler=prefill_first")
    run = AnalysedRun.of(record, RunInfo(to_mapping(config)), partial(quick_explanation, seconds=1e-3))
    assert "lack of time" in run.words[-1]
    assert "No cause worth fixing" not in run.words[0]


def test_a_run_that_was_not_explained_is_sized_by_its_spans() -> None:
    record, config = run_of(EVEN, "simulation.devices=[a100-80g,a6000]")
    by_spans, by_twin = (
        analysed(record, to_mapping(config)).causes[0],
        explained(EVEN, "simulation.devices=[a100-80g,a6000]").causes[0],
    )
    assert (by_spans.cause, by_spans.stage) == (Root.SLOW_STAGE, 1)
    assert by_spans.seconds == pytest.approx(by_twin.seconds, rel=0.15)


def test_waits_for_a_processor_are_told_from_transport() -> None:
    record, config = run_of(EVEN, "simulation.devices=[a100-80g,a6000]")
    late = [msgspec.structs.replace(span, contended_before=1.0) for span in record.spans]
    named = analysed(replace(record, spans=late), to_mapping(config)).ledger
    idle, before = named.seconds_by_cause(), analysed(record, to_mapping(config)).ledger.seconds_by_cause()
    assert idle[Cause.CONTENTION] == pytest.approx(before[Cause.TRANSPORT] + before[Cause.CONTROL])
    assert idle[Cause.TRANSPORT] == idle[Cause.CONTROL] == 0.0
    named.check()


@pytest.mark.parametrize(
    ("lengths", "is_named"),
    [
        ([100] * 38 + [6000] * 2, True),
        ([100] * 38 + [450] * 2, False),  # of one or two micro-batches
        ([round(60 * 1.12**n) for n in range(40)], False),  # which just vary
        ([100] * 39 + [2000] * 21, False),  # which are not few
    ],
)
def test_long_prompts_are_few_and_far_from_the_others(lengths: list[int], is_named: bool) -> None:
    record, config = run_of(SARATHI, "scheduler.chunk=256")
    twin = twin_of(record, Ledger(record), to_mapping(config))
    pairs = zip(cycle(twin.items), lengths, strict=False)
    items = [msgspec.structs.replace(item, prompt=bytes(length)) for item, length in pairs]
    found = [each.cause for each in twins_without(replace(twin, items=items))]
    assert (Root.LONG_PROMPTS in found) == is_named
