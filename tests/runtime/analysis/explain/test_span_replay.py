"""Recorded spans replayed: unchanged times give the run itself, and a cause's size is that of the simulator's twin."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import msgspec
import numpy as np
import pytest

from gapless.conf.schema import SimulateConfig
from gapless.launch.compose import compose_one
from gapless.launch.turns import requests
from gapless.runtime.analysis.explain.learned_run import learn_run
from gapless.runtime.analysis.explain.roots import Root
from gapless.runtime.analysis.explain.sized_cause import SizedCause
from gapless.runtime.analysis.explain.span_replay import SpanReplay, replayed_spans
from gapless.runtime.analysis.ledger.ledger import Ledger
from gapless.runtime.core.micro_batch_columns import Floats
from gapless.runtime.core.run_record import RunRecord
from gapless.runtime.simulation.pipeline.run import simulated
from gapless.runtime.simulation.pipeline.setting import make_setting

RUN = ("model=llama-33b", "hardware=a100-80g", "parallel=pp4", "cache.num_blocks=3000", "workload=zipf")
SHORT = ("workload.num_prompts=24", "workload.max_len=600", "workload.min_len=100")
POLICIES = (
    "equal_time",
    "orca_best",
    "prefill_first",
    "request_level",
    "sarathi",
    "token_budget",
    "token_throttle",
)
VARIANTS = {
    "at once": (),
    "arrivals": ("workload.request_rate=3",),
    "clients": ("workload.max_concurrency=5",),
    "noise": ("simulation.jitter=0.2", "simulation.straggler_rate=0.02", "simulation.straggler_factor=4"),
    "blocking sends": ("simulation.overlap_sends=false", "simulation.dispatch_ms=1", "simulation.result_ms=2"),
    "deep": ("parallel.depth=7",),
    "shallow": ("parallel.depth=2",),
    "drafts": ("scheduler.drafts=2",),
    "small cache": ("cache.num_blocks=120",),
    "faults": ("simulation.faults.at=[2,4]",),
    "split": ("parallel.layers=[24,12,12,12]",),
    "two stages": ("model=llama-13b", "parallel=pp2", "parallel.layers=[24,16]"),
}
NO_LINK = {"least_us": 1e-3, "ramp_us": 0.0, "gigabytes_per_s": 1e9, "knee": 1.0}


def link(**constants: float) -> tuple[str, ...]:
    return ("cluster.devices_per_node=1", *(f"cluster.network.{name}={value}" for name, value in constants.items()))


@cache
def run_of(*overrides: str) -> RunRecord:
    config = compose_one([*RUN, *SHORT, *overrides], SimulateConfig, "simulate")
    setting = make_setting(config)
    workload, _ = requests(config, {config.scheduler: setting.plan})
    return simulated(setting, workload)[0].record


def without_hidden_arrivals(record: RunRecord) -> RunRecord:
    """Return a record as of real ranks, which see an activation only once they wait for it."""
    spans = [msgspec.structs.replace(span, input=max(span.input, span.ready)) for span in record.spans]
    return replace(record, spans=spans)


def replay_of(record: RunRecord) -> SpanReplay:
    found = SpanReplay.of(record, Ledger(record))
    assert found is not None
    return found


def played(record: RunRecord, compute: Floats) -> RunRecord:
    """Return a record as if stages had computed for so long, [S, N]."""
    run = replay_of(record)
    slowed = run.record_with(*replace(run.times, compute=compute).replay())
    free = [-math.inf] * record.num_stages
    spans = []
    for span in sorted(slowed.spans, key=lambda span: span.begin):
        ready = max(free[span.stage], span.ready if free[span.stage] == -math.inf else -math.inf)
        spans.append(msgspec.structs.replace(span, ready=min(ready, span.begin), input=span.begin))
        free[span.stage] = span.sent
    return replace(slowed, spans=spans)


def sizes_of(record: RunRecord, layers: list[int] | None = None) -> dict[Root, SizedCause]:
    ledger = Ledger(record)
    found = replayed_spans(record, ledger, layers)
    middles = [each.low + each.high for each in found]
    assert middles == sorted(middles, reverse=True)
    for each in found:
        assert sum(each.shows.values()) == pytest.approx(each.seconds * record.num_stages, rel=1e-3), each
        assert each.low <= each.seconds <= each.high
        assert (each.low == 0.0) == (each.cause == Root.MICRO_BATCHES)
        assert each.share == each.seconds / ledger.span_seconds
    return {each.cause: each for each in found}


@pytest.mark.parametrize("is_real", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_replay_of_unchanged_times_is_the_run(policy: str, variant: str, is_real: bool) -> None:
    record = run_of(f"scheduler={policy}", *VARIANTS[variant])
    record = without_hidden_arrivals(record) if is_real else record
    ledger = Ledger(record)
    run = SpanReplay.of(record, ledger)
    assert run is not None
    times, begins, ends = run.times, run.begins, run.ends
    for stage, (lane, place) in enumerate(zip(ledger.lanes, run.places, strict=True)):
        assert np.abs(begins[stage] - lane.begin[place]).max() < 1e-6 * ledger.span_seconds, stage
        assert np.abs(ends[stage] - lane.end[place]).max() < 1e-6 * ledger.span_seconds, stage
    assert min(times.compute.min(), times.turn.min(), times.link.min()) >= -1e-9


CARDS = "simulation.devices=[{}]".format
PLANTS: list[tuple[Root, int | None, tuple[str, ...], tuple[str, ...]]] = [
    (Root.SLOW_STAGE, 0, (CARDS("a6000,a100-80g,a100-80g,a100-80g"), "parallel.layers=[15,15,15,15]"), ()),
    (Root.SLOW_STAGE, 2, (CARDS("a100-80g,a100-80g,a6000,a100-80g"), "parallel.layers=[15,15,15,15]"), ()),
    (
        Root.SLOW_STAGE,
        3,
        (CARDS("h100,h100,h100,a100-80g"), "parallel.layers=[15,15,15,15]"),
        (CARDS("h100,h100,h100,h100"),),
    ),
    (Root.UNEVEN_LAYERS, 0, ("parallel.layers=[24,12,12,12]",), ()),
    (Root.UNEVEN_LAYERS, 0, ("parallel.layers=[18,14,14,14]",), ()),
    (Root.UNEVEN_LAYERS, 3, ("parallel.layers=[13,13,13,21]",), ()),
    (Root.UNEVEN_LAYERS, 1, ("parallel.layers=[18,20,11,11]",), ()),
    *(
        (Root.TRANSPORT, None, link(**NO_LINK | {"gigabytes_per_s": rate, "least_us": 100.0}), link(**NO_LINK))
        for rate in (0.02, 0.05, 0.2)
    ),
]  # the root, its stage, what plants it, and what the same run is without it


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize(("root", "stage", "plant", "healthy"), PLANTS)
def test_a_size_is_the_run_less_its_twin(
    root: Root, stage: int | None, plant: tuple[str, ...], healthy: tuple[str, ...], noise: float
) -> None:
    jitter = ("scheduler=sarathi", "workload.num_prompts=40", f"simulation.jitter={noise}")
    record = run_of(*jitter, *plant)
    twin = run_of(*jitter, *(healthy or ("parallel.layers=[15,15,15,15]",)))
    truth = Ledger(record).span_seconds - Ledger(twin).span_seconds
    layers = next((each.removeprefix("parallel.layers=") for each in plant if "layers" in each), "[15,15,15,15]")
    for each in (record, without_hidden_arrivals(record)):
        found = sizes_of(each, [int(number) for number in layers.strip("[]").split(",")])
        assert next(iter(found)) == root
        assert stage is None or found[root].stage == stage
        assert found[root].seconds == pytest.approx(truth, rel=0.05), (found, truth)


def test_an_lm_head_is_told_from_a_slow_card() -> None:
    """LLaMA 3's vocabulary makes the last stage longer by what it samples, which is little of a prompt."""
    record = run_of("model=llama3-8b", "scheduler=sarathi", "scheduler.chunk=512", "workload.num_prompts=60")
    assert next(iter(sizes_of(record, [8] * 4))) == Root.LM_HEAD


OTHERS = [
    (Root.CHANCE, ("simulation.jitter=0.3",)),
    (Root.CHANCE, ("simulation.straggler_rate=0.03", "simulation.straggler_factor=4")),
    (Root.CONTROL, ("simulation.result_ms=4", "simulation.dispatch_ms=4")),
]


@pytest.mark.parametrize("stages", [("parallel.layers=[15,15,15,15]",), ("model=llama-13b", "parallel=pp2")])
@pytest.mark.parametrize(("root", "plant"), OTHERS)
def test_chance_and_control_are_told_from_slow_stages(
    root: Root, plant: tuple[str, ...], stages: tuple[str, ...]
) -> None:
    healthy = (*stages, "workload.num_prompts=60", "workload.max_len=1024", "scheduler=token_throttle")
    record = run_of(*healthy, *plant)
    truth = Ledger(record).span_seconds - Ledger(run_of(*healthy)).span_seconds
    found = sizes_of(record)
    assert next(iter(found)) == root
    assert found[root].seconds == pytest.approx(truth, rel=0.1)
    assert set(found) <= {root, Root.MICRO_BATCHES}


@pytest.mark.parametrize("slowdown", [2.5, 4.0])
def test_a_straggler_costs_what_its_window_is_longer(slowdown: float) -> None:
    record = run_of("scheduler=sarathi", "workload.num_prompts=60", "parallel.layers=[15,15,15,15]")
    compute = replay_of(record).times.compute.copy()
    count = compute.shape[1]
    compute[1, count // 4 : count // 2] *= slowdown
    slowed = played(record, compute)
    truth = Ledger(slowed).span_seconds - Ledger(record).span_seconds
    found = sizes_of(slowed)
    assert next(iter(found)) == Root.STRAGGLER
    assert found[Root.STRAGGLER].stage == 1
    assert found[Root.STRAGGLER].seconds == pytest.approx(truth, rel=0.1)


@pytest.mark.parametrize("first", [0, 40])
def test_a_stall_is_a_straggler_and_no_noise_of_the_learned_run(first: int) -> None:
    overrides = ("scheduler=sarathi", "workload.num_prompts=60", "parallel.layers=[15,15,15,15]")
    record, config = run_of(*overrides), compose_one([*RUN, *SHORT, *overrides], SimulateConfig, "simulate")
    compute = replay_of(record).times.compute.copy()
    compute[1, first : first + 3] += 0.1 * Ledger(record).span_seconds
    stalled = played(record, compute)
    truth = Ledger(stalled).span_seconds - Ledger(record).span_seconds
    found = sizes_of(stalled)
    assert next(iter(found)) == Root.STRAGGLER
    assert found[Root.STRAGGLER].seconds == pytest.approx(truth, rel=0.1)
    learned = learn_run(config, stalled)
    assert learned.stalled == pytest.approx(0.3 * Ledger(record).span_seconds, rel=0.05)
    assert learned.fit.slower == pytest.approx(learn_run(config, record).fit.slower, rel=0.02)


def test_results_that_come_at_once_hold_no_dispatch() -> None:
    """The coordinator reads a result late, with the next one; the wait before a dispatch ended with the first."""
    record = run_of("scheduler=sarathi", "workload.num_prompts=40", "parallel.layers=[15,15,15,15]")
    batches = [msgspec.structs.replace(each) for each in record.micro_batches]
    for each in batches[8:-8:3]:
        before = each.completed
        assert before is not None
        following = next(other for other in batches if other.dispatched >= before)
        batches[each.micro_batch + 1].completed = following.dispatched
    run = replay_of(replace(record, micro_batches=batches))
    alone = replay_of(record)
    assert (run.times.follows >= 0).mean() > 0.9
    no_compute = [replace(each.times, compute=each.times.compute / 2).replay()[1].max() for each in (run, alone)]
    assert no_compute[0] == pytest.approx(no_compute[1], rel=0.02)


def test_contention_is_sized_and_told_from_a_slow_stage() -> None:
    healthy = run_of("scheduler=sarathi", "workload.num_prompts=40", "parallel.layers=[15,15,15,15]")
    compute = replay_of(healthy).times.compute.copy()
    waited = dict(enumerate((0.6 * compute[2]).tolist()))
    compute[2] *= 1.6
    slowed = played(healthy, compute)
    spans = [
        msgspec.structs.replace(span, contended=waited[span.micro_batch]) if span.stage == 2 else span
        for span in slowed.spans
    ]
    record = replace(slowed, spans=spans)
    truth = Ledger(record).span_seconds - Ledger(healthy).span_seconds
    found = sizes_of(record)
    assert found[Root.CONTENTION].seconds == pytest.approx(truth, rel=0.02)
    assert found[Root.CONTENTION].stage == 2
    assert Root.SLOW_STAGE not in found


def test_a_window_of_a_server_has_the_causes_of_its_run() -> None:
    plant = (CARDS("a6000,a100-80g,a100-80g,a100-80g"), "parallel.layers=[15,15,15,15]", "workload.num_prompts=60")
    record = run_of("scheduler=sarathi", *plant)
    first, last = (len(record.micro_batches) * part // 4 for part in (1, 3))
    window = replace(
        record,
        micro_batches=record.micro_batches[first:last],
        spans=[span for span in record.spans if first + span.stage <= span.micro_batch < last],
        requests=[],
        crossing=record.requests,
    )
    of_run, of_window = (sizes_of(each)[Root.SLOW_STAGE] for each in (record, window))
    assert of_window.stage == of_run.stage == 0
    assert of_window.share == pytest.approx(of_run.share, rel=0.05)


def test_repairs_cost_the_seconds_without_a_pipeline() -> None:
    record = run_of("scheduler=sarathi", "simulation.faults.at=[2,4]")
    down = sum(fault.seconds or 0.0 for fault in record.faults)
    assert sizes_of(record)[Root.RECOVERY].seconds == pytest.approx(down)


def test_a_healthy_run_has_no_cause() -> None:
    assert sizes_of(run_of("scheduler=token_throttle", "parallel.layers=[15,15,15,15]"), [15] * 4) == {}
