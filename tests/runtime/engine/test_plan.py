"""The plan: B by `scheduler.batch`, and how many requests it lets run at once."""

from dataclasses import replace

import numpy as np
import pytest

from gapless.conf.build import build, load_group
from gapless.conf.policies import POLICY_CONFIGS
from gapless.conf.schema import SimulateConfig
from gapless.models.memory import slot_bound
from gapless.runtime.engine.plan import make_plan
from gapless.runtime.ledger.ledger import Ledger
from gapless.runtime.ledger.summary import summarize
from gapless.runtime.simulation.replicas import simulated
from gapless.runtime.simulation.setting import make_setting
from gapless.runtime.workload.workload import Workload

CONTEXT = 65536
SLOTS = 13  # contexts that fit beside the weights
NUM = 120  # requests


def config_of(policy: str, **keys: object) -> SimulateConfig:
    """A model of a long context over two stages."""
    return build(SimulateConfig, {
        "model": load_group("model", "llama3-8b")
        | {"architecture": load_group("model", "llama3-8b")["architecture"] | {"max_position": CONTEXT}},
        "hardware": load_group("hardware", "a100-80g") | {"memory_gib": 60.0},
        "parallel": {"pp": 2, "launcher": "ray"},
        "scheduler": {"name": policy} | keys,
    })  # fmt: skip


@pytest.mark.parametrize("policy", sorted(POLICY_CONFIGS))
def test_b_is_max_batch_and_the_slot_bound_where_it_is_asked_for(policy: str) -> None:
    plan = make_plan(config_of(policy))
    assert plan.limits.batch == 256
    assert plan.num_blocks >= SLOTS * CONTEXT / plan.block_size
    by_slots = config_of(policy, batch="slots")
    slots = slot_bound(plan.arch, by_slots.parallel, by_slots.hardware, 2)
    assert slots == SLOTS
    assert make_plan(by_slots).limits.batch == SLOTS // plan.limits.depth.most
    assert make_plan(replace(by_slots, scheduler=replace(by_slots.scheduler, max_batch=2))).limits.batch == 2
    assert make_plan(config_of(policy, batch=7, max_batch=3)).limits.batch == 7
    assert make_plan(config_of(policy, max_batch=9)).limits.batch == 9


@pytest.mark.parametrize("policy", sorted(POLICY_CONFIGS))
def test_short_requests_of_a_long_context_run_together(policy: str) -> None:
    """By slots a fraction of the KV cache is used, and a run takes longer."""
    workload = Workload(
        input_lens=np.full(NUM, 400), output_lens=np.full(NUM, 60), arrivals=np.zeros(NUM), vocab_size=100, seed=0
    )
    seconds = {}
    for batch in (None, "slots"):
        (replica,) = simulated(make_setting(config_of(policy, batch=batch)), workload)
        summary = summarize(replica.record, Ledger(replica.record))
        assert (summary["completed"], summary["batch"]) == (NUM, replica.coordinator.scheduler.limits.batch)
        assert summary["depth"] == replica.coordinator.scheduler.limits.depth.most
        seconds[batch] = summary["duration"]
    assert seconds[None] < seconds["slots"]


def stages_of(devices: list[str] | None, **parallel: object) -> list[int]:
    config = config_of("sarathi")
    config = replace(config, parallel=replace(config.parallel, **parallel),  # type: ignore[arg-type]
                     simulation=replace(config.simulation, devices=devices and tuple(devices)))  # fmt: skip
    return [len(layers) for layers in make_plan(config).layers]


def test_the_default_split_weighs_the_speed_of_the_stages() -> None:
    assert stages_of(None) == stages_of(["a100-80g", "a100-80g"]) == [16, 16]
    fast_last, fast_first = stages_of(["a100-80g", "h100"]), stages_of(["h100", "a100-80g"])
    assert fast_last == [10, 22]
    assert fast_first[0] >= 21
    assert stages_of(None, stage_speeds=(1.0, 3.0)) == [8, 24]
    assert stages_of(["a100-80g", "h100"], layers=(16, 16)) == [16, 16]


def test_a_stage_of_little_memory_takes_the_layers_that_fit() -> None:
    """Of eight A6000s beside an H200, by speed alone the H200 would take more; here the order of sizes decides."""
    slow, fast = stages_of(["a6000", "h200"])
    assert slow < fast
    a_layer = 2 * CONTEXT * 8 * 128 * 2  # bytes of its keys and values for one sequence
    assert slow * a_layer < 48 << 30


def test_a_faster_stage_takes_no_more_layers_than_fit_where_memories_are_alike() -> None:
    """By speed alone the second stage would take 52 of 80 layers, and its weights alone 87 GiB of 67."""
    config = build(SimulateConfig, {
        "model": load_group("model", "llama2-70b"), "hardware": load_group("hardware", "a100-80g"),
        "parallel": {"pp": 2, "launcher": "ray"}, "scheduler": {"name": "sarathi"},
    })  # fmt: skip
    mixed = replace(config, simulation=replace(config.simulation, devices=("a100-80g", "h100")))
    given = replace(config, parallel=replace(config.parallel, stage_speeds=(1.0, 3.0)))
    for each in (mixed, given):
        slow, fast = (len(layers) for layers in make_plan(each).layers)
        assert (slow + fast, fast >= slow) == (80, True)
