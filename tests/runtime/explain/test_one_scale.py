"""Runs that were slowed in one known way each: the first sentence names it, in seconds of the run."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import msgspec
import pytest

from gapless.conf.build import to_mapping
from gapless.conf.schema import SimulateConfig
from gapless.launch.compose import compose_one
from gapless.launch.turns import requests
from gapless.runtime.core.run_record import RunRecord
from gapless.runtime.explain.analysed_run import AnalysedRun
from gapless.runtime.explain.roots import Root
from gapless.runtime.ledger.causes import Cause
from gapless.runtime.simulation.run import simulated
from gapless.runtime.simulation.setting import make_setting
from tests.support.written_runs import analysed

LARGE = ("model=llama2-70b", "hardware=a100-80g", "cluster=ethernet-100g", "parallel=pp2", "parallel.tp=8")
SMALL = ("model=llama-13b", "hardware=a100-80g", "parallel=pp2", "workload=zipf", "workload.num_prompts=60")
SPLIT = "parallel.layers=[26,14]"
LONG = ("workload=fixed", "workload.input_len=7500", "workload.output_len=32", "workload.num_prompts=24")


@cache
def run_of(*overrides: str) -> tuple[RunRecord, SimulateConfig]:
    config = compose_one(list(overrides), SimulateConfig, "simulate")
    setting = make_setting(config)
    workload, _ = requests(config, {config.scheduler: setting.plan})
    return simulated(setting, workload)[0].record, config


def analysis_of(*overrides: str) -> AnalysedRun:
    record, config = run_of(*overrides)
    return analysed(record, to_mapping(config))


@pytest.mark.parametrize(
    ("run", "root", "first"),
    [
        (
            (*LARGE, "scheduler=sarathi", "scheduler.chunk=256"),
            Root.SMALL_CHUNK,
            "The chunk is too small: .* of 237 pro",
        ),
        (
            (*SMALL, "scheduler=sarathi", "scheduler.chunk=4096"),
            Root.MICRO_BATCHES,
            "PB1 .* the chunk of 4,096 .*large",
        ),
        (
            (*SMALL, "scheduler=prefill_first"),
            Root.DEALING,
            "All requests .* the policy prefill_first put them into few",
        ),
        (
            (*SMALL, "workload.request_rate=6"),
            Root.OVERLOAD,
            r"Overload: 6\.3 requests/s arrived and 2\.\d were served",
        ),
        ((*LARGE, "cluster.devices_per_node=4"), Root.TENSOR_PARALLEL, "Tensor parallelism across nodes takes "),
        ((*SMALL, SPLIT), Root.UNEVEN_LAYERS, "Stage 0 holds 26 of 40 layers"),
        ((*SMALL, "simulation.faults.at=[2,4]"), Root.RECOVERY, "The pipeline had failed for .* 2 faults"),
        ((*SMALL, "scheduler.max_batch=2"), Root.SMALL_BATCH, "Memory bandwidth at small batches .* holds 2 at most"),
        (
            (*SMALL, "simulation.devices=[a100-80g,a6000]", "parallel.layers=[20,20]"),
            Root.SLOW_STAGE,
            "Stage 1 takes 2",
        ),
        ((*SMALL, "model=llama3-8b", *LONG), Root.LONG_PROMPTS, "Long prompts: attention over what comes before "),
        ((*SMALL, "workload.max_concurrency=2"), Root.SMALL_BATCH, "Too few requests: .* with 2 unfinished at most"),
        ((*SMALL, "cache.num_blocks=260"), Root.SMALL_BATCH, "The KV cache had no room for waiting requests: "),
    ],
    ids=lambda each: str(each) if isinstance(each, Root) else "",
)
def test_the_first_sentence_names_what_slowed_a_run(run: tuple[str, ...], root: Root, first: str) -> None:
    found = analysis_of(*run)
    assert found.findings.largest is not None
    assert found.findings.largest.root == root, found.words
    assert re.match(first, found.words[0]), found.words
    assert re.search(r"% of (all )?stage time \([\d.]+ m?s of the run\)", found.words[0]), found.words


def test_a_run_that_nothing_slowed_says_how_close_to_the_bound_it_is() -> None:
    (only,) = analysis_of(*SMALL, "scheduler=equal_time").words
    assert re.match(
        r"Nothing large slowed this run: of 22\.\d+ s, the work itself takes 20\.\d+ s, 92\.\d% of it", only
    )


@pytest.mark.parametrize("chunk", [64, 256, 4096])
def test_work_and_causes_make_up_the_run(chunk: int) -> None:
    found = analysis_of(*SMALL, "scheduler=sarathi", f"scheduler.chunk={chunk}").findings
    assert found.bound_share is not None
    assert sum(each.share for each in found.ranked) + found.bound_share == pytest.approx(1.0)


def test_what_a_small_chunk_costs_is_what_a_larger_one_saves() -> None:
    small, large = (analysis_of(*LARGE, "scheduler=sarathi", f"scheduler.chunk={chunk}") for chunk in (128, 1024))
    saved = small.ledger.span_seconds - large.ledger.span_seconds
    largest = small.findings.largest
    assert largest is not None
    assert largest.root == Root.SMALL_CHUNK
    assert largest.share * small.ledger.span_seconds == pytest.approx(saved, rel=0.25)


def test_the_rate_that_would_hold_holds() -> None:
    overload = analysis_of(*SMALL, "workload.request_rate=6").findings.largest
    assert overload is not None
    rate = overload.evidence["served_per_s"]
    below = analysis_of(*SMALL, "workload.num_prompts=150", f"workload.request_rate={rate:.2f}").findings
    assert Root.OVERLOAD not in {each.root for each in below.ranked if each.is_large}


def test_contention_is_told_from_transport_and_from_a_slow_stage() -> None:
    record, config = run_of(*SMALL, "simulation.devices=[a100-80g,a6000]", "parallel.layers=[20,20]")
    beside = [sum(s.end - s.begin for s in record.spans if s.stage == stage) for stage in (0, 1)]
    share = 1 - beside[0] / beside[1]  # as if stage 1 were as fast, and had to wait for its processor
    spans = [
        msgspec.structs.replace(span, contended=share * (span.end - span.begin)) if span.stage else span
        for span in record.spans
    ]
    found = analysed(replace(record, spans=spans), to_mapping(config))
    assert found.words[0].startswith("Processor contention on stage 1 takes "), found.words
    found.ledger.check()
    late = [msgspec.structs.replace(span, contended_before=1.0) for span in record.spans]
    named = analysed(replace(record, spans=late), to_mapping(config)).ledger
    idle, before = named.seconds_by_cause(), analysed(record, to_mapping(config)).ledger.seconds_by_cause()
    assert idle[Cause.CONTENTION] == pytest.approx(before[Cause.TRANSPORT] + before[Cause.CONTROL])
    assert idle[Cause.TRANSPORT] == idle[Cause.CONTROL] == 0.0
    named.check()
