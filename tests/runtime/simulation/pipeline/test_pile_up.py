"""What `equal_time` does where more requests come than its chunk carries."""

from __future__ import annotations

from gapless.conf.schema import SimulateConfig
from gapless.launch.compose import compose_one
from gapless.launch.turns import requests
from gapless.runtime.analysis.ledger.running_totals import RunningTotals
from gapless.runtime.simulation.pipeline.run import simulated
from gapless.runtime.simulation.pipeline.setting import make_setting


def summary(*keys: str) -> dict[str, float]:
    given = (
        "hardware=a100-80g",
        "parallel=tp4_pp2",
        "model=llama2-70b",
        "workload=fixed",
        "simulation.record=false",
        "workload.input_len=1024",
        "workload.output_len=64",
        *keys,
    )
    config = compose_one(given, SimulateConfig, "simulate")
    (replica,) = simulated(make_setting(config), requests(config)[0], make_totals=RunningTotals)
    assert replica.totals is not None
    return replica.totals.summary(replica.record)


def test_chunks_that_grow_carry_more_requests_than_any_other_policy_of_small_chunks() -> None:
    given = ("workload.num_prompts=200", "workload.request_rate=12")
    grown = summary(*given, "scheduler=equal_time")
    small = [
        summary(*given, *keys)
        for keys in (
            ("scheduler=equal_time", "scheduler.iterations=null"),
            ("scheduler=sarathi",),
            ("scheduler=token_budget",),
        )
    ]
    assert grown["request_throughput"] > 1.1 * max(one["request_throughput"] for one in small)
    assert grown["p99_ttft_ms"] < 0.7 * min(one["p99_ttft_ms"] for one in small)


def test_chunks_do_not_grow_where_prompts_keep_up() -> None:
    given = ("workload.num_prompts=100", "workload.request_rate=1", "scheduler=equal_time")
    assert summary(*given) == summary(*given, "scheduler.iterations=null")
