"""Candidate changes: what is tried of a setting, and what is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gapless.conf.build import build, load_group
from gapless.conf.policies import POLICY_CONFIGS
from gapless.conf.schema import SimulateConfig
from gapless.runtime.analysis.explain.changes import Change, Shown, candidates, with_policy
from gapless.runtime.analysis.explain.even_split import even_split, mean_seconds
from gapless.runtime.analysis.explain.twin import changed_config
from gapless.runtime.simulation.cost.stage_costs import MicroBatchShape
from gapless.runtime.simulation.pipeline.setting import make_setting
from tests.support.explained_runs import run

SHOWN = Shown(chunk=200, most_requests=40, has_queue=True, kv_full=False)


def config_of(policy: str = "sarathi", grid: str = "tp2_pp2", **keys: object) -> SimulateConfig:
    return build(
        SimulateConfig,
        {
            "model": load_group("model", "llama-7b"),
            "hardware": load_group("hardware", "a100-80g"),
            "parallel": load_group("parallel", grid) | keys.pop("parallel", {}),  # type: ignore[operator]
            "scheduler": load_group("scheduler", policy) | keys,
            "workload": load_group("workload", "zipf") | {"num_prompts": 40, "min_len": 100, "max_len": 800},
        },
    )


def of_family(found: list[Change], family: str) -> list[dict[str, object]]:
    return [dict(change.values) for change in found if change.family == family]


@pytest.mark.parametrize("policy", list(POLICY_CONFIGS))
def test_each_candidate_composes_and_differs(policy: str) -> None:
    config = config_of(policy)
    setting = make_setting(config)
    found = list(candidates(setting, replace(SHOWN, kv_full=True)))
    made = [changed_config(config, change.values) for change in found]
    assert config not in made
    assert len(set(made)) == len(made)
    assert len(of_family(found, "policy")) == len(POLICY_CONFIGS) - 1
    assert {tuple(change.overrides) for change in found if change.family == "grid"} == {
        ("parallel.pp=4", "parallel.tp=1"),
        ("parallel.pp=1", "parallel.tp=4"),
    }


def test_chunk_is_halved_doubled_and_left_to_the_policy() -> None:
    for chunk, tried in (
        (128, ["auto", 256, 512, 64, 1024, 2048, 4096]),
        ("auto", [400, 800, 100, 1600, 3200, 6400, 200]),
    ):
        found = list(candidates(make_setting(config_of(chunk=chunk)), SHOWN))
        assert [values["scheduler.chunk"] for values in of_family(found, "chunk")] == tried


def test_another_policy_keeps_the_chunk_where_it_has_one() -> None:
    policy = config_of(chunk=96).scheduler
    assert with_policy(policy, "token_budget").overrides == (
        "scheduler=token_budget",
        "scheduler.max_batched_tokens=96",
    )
    assert with_policy(policy, "equal_time").overrides == ("scheduler=equal_time", "scheduler.chunk=96")
    assert with_policy(policy, "orca_best").overrides == ("scheduler=orca_best",)
    assert with_policy(policy, "token_throttle").overrides == ("scheduler=token_throttle",)  # its bound is of a batch


def test_only_what_a_run_shows_to_matter_is_tried() -> None:
    setting = make_setting(config_of())
    quiet = replace(SHOWN, has_queue=False, most_requests=2)
    families = {change.family for change in candidates(setting, quiet)}
    assert families == {"policy", "chunk", "depth", "grid"}
    full = make_setting(config_of(max_batch=40))
    assert {"scheduler.max_batch": 80} in of_family(list(candidates(full, SHOWN)), "admission")
    assert {"scheduler.max_batch": 512} not in of_family(list(candidates(setting, SHOWN)), "admission")


def test_depth_that_the_run_has_is_not_tried() -> None:
    found = of_family(list(candidates(make_setting(config_of(parallel={"depth": 3})), SHOWN)), "depth")
    assert found == [{"parallel.depth": 2}, {"parallel.depth": 4}]
    found = of_family(list(candidates(make_setting(config_of("equal_time")), SHOWN)), "depth")
    assert [values["parallel.depth"] for values in found] == [2, 3, 4]  # it chooses 2 or 3 by itself


def test_grid_resets_what_was_set_for_the_stages() -> None:
    config = config_of(parallel={"layers": [20, 12], "depth": 3})
    (deep, _) = of_family(list(candidates(make_setting(config), SHOWN)), "grid")
    assert deep == {"parallel.pp": 1, "parallel.tp": 4, "parallel.layers": None, "parallel.depth": None} or deep == {
        "parallel.pp": 4,
        "parallel.tp": 1,
        "parallel.layers": None,
        "parallel.depth": None,
    }


@pytest.mark.parametrize("layers", [[22, 10], [6, 26]])
def test_split_evens_the_stages(layers: list[int]) -> None:
    config = config_of(parallel={"layers": layers})
    setting = make_setting(config)
    record = run(config)

    def changed(values: object) -> object:
        return make_setting(changed_config(config, values))  # type: ignore[arg-type]

    change = even_split(setting, changed, record.micro_batches)  # type: ignore[arg-type]
    assert change is not None
    shapes = [MicroBatchShape.of_record(each) for each in record.micro_batches]
    before, after = mean_seconds(setting.costs, shapes), mean_seconds(changed(change.values).costs, shapes)  # type: ignore[attr-defined]
    a_layer = max(before) / max(layers)
    assert max(after) - min(after) <= a_layer < max(before) - min(before)
    even = make_setting(changed_config(config, change.values))
    assert even_split(even, changed, record.micro_batches) is None  # type: ignore[arg-type]


def test_change_as_text() -> None:
    change = Change("own", {"parallel.layers": [10, 12], "parallel.depth": None})
    assert change.overrides == ("parallel.layers=[10,12]", "parallel.depth=null")
    assert change.label == "layers=[10,12]"
    assert Change("memory", {"cache.num_blocks": None}).label == "cache.num_blocks=null"
