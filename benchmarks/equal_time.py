"""Compares `equal_time` with `sarathi` on a simulated cluster: `python -m benchmarks.equal_time [TRACE.csv.gz]`.

GPT-3 over 8 x 8 A100s (paper 5.3, B = 27, chunk 256) serves Figure 12's lengths, first with all requests there at the
start, then at shares of the rate that `sarathi` sustains. A trace in Azure's form adds its requests, all there at the
start, where each policy has the B that memory allows. Prints the makespan; the idle share of all stages without
`starved` and `fill_drain`; the idle share of the busiest stage with all causes; latencies; and the makespan of the same
work without any bubble over the policy's makespan. A minute and a half for 10,000 requests; --requests bounds them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gapless.conf.policies import EqualTimeConfig, SarathiConfig, SchedulerConfig
from gapless.conf.schema import SimulateConfig
from gapless.conf.workloads import TraceConfig, WorkloadConfig
from gapless.launch.compose import compose_one
from gapless.launch.turns import labels, requests
from gapless.runtime.experiments.bound import bubble_free_seconds
from gapless.runtime.ledger.ledger import Ledger
from gapless.runtime.ledger.summary import summarize
from gapless.runtime.simulation.run import simulated
from gapless.runtime.simulation.setting import make_setting

from .support.results import add_json_option, write_json

SETTING = (
    "model=gpt3-175b",
    "hardware=a100-80g",
    "parallel=tp8_pp8",
    "workload=zipf",
    "simulation.host=false",
    "simulation.last_layer=all",
)
HEAD = f"{'':42}{'makespan':>10}{'idle':>8}{'busiest':>9}{'p50 TBT':>10}{'p99 TBT':>10}{'p99 TTFT':>10}{'bound':>9}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", nargs="?")
    parser.add_argument("--requests", type=int, default=10_000)
    add_json_option(parser)
    arguments = parser.parse_args()
    config = compose_one(SETTING, SimulateConfig, "simulate")
    config = replace(config, workload=replace(config.workload, num_prompts=arguments.requests))
    alike = SarathiConfig(batch=27), EqualTimeConfig(batch=27), EqualTimeConfig(batch=27, iterations=None)

    rows = compare(f"Figure 12, {arguments.requests} requests at once", config, config.workload, alike)
    sarathi = rows[0]["makespan_s"]
    for share in (0.95, 0.8):
        rate = share * arguments.requests / sarathi
        some = replace(config.workload, num_prompts=max(1, arguments.requests // 5), request_rate=rate)
        rows += compare(f"{share:.0%} of the rate that sarathi sustains: {rate:.2f} requests/s", config, some, alike)
    if arguments.trace:
        trace = TraceConfig(path=arguments.trace, num_prompts=arguments.requests, request_rate=float("inf"))
        by_memory = SarathiConfig(), EqualTimeConfig(), EqualTimeConfig(iterations=None)
        rows += compare("the trace, all at once", config, trace, by_memory)
    write_json(arguments.json, "equal_time", {"policies": rows})


def compare(
    title: str, config: SimulateConfig, workload: WorkloadConfig, policies: Sequence[SchedulerConfig]
) -> list[dict[str, Any]]:
    """Simulate each policy, and print and return a row for each."""
    print(f"\n{title}\n{HEAD}")
    return [
        {"arrivals": title, **row(label, replace(config, workload=workload, scheduler=policy))}
        for label, policy in zip(labels(policies), policies, strict=True)
    ]


def row(label: str, config: SimulateConfig) -> dict[str, Any]:
    items, _ = requests(config)
    (replica,) = simulated(make_setting(config), items)
    ledger = Ledger(replica.record)
    summary = summarize(replica.record, ledger)
    batch = max(len(micro_batch.decodes) for micro_batch in replica.record.micro_batches)
    bound = bubble_free_seconds(replica.pipeline.costs, items.input_lens, items.output_lens, batch)
    busiest = max(summary["stage_busy_fraction"])
    found = {
        "policy": label,
        "most_decodes": batch,
        "makespan_s": float(summary["duration"]),
        "idle_share": summary["bubble_fraction_inner"],
        "busiest_idle_share": 1 - busiest,
        "median_tbt_ms": summary["median_itl_ms"],
        "p99_tbt_ms": summary["p99_itl_ms"],
        "p99_ttft_s": summary["p99_ttft_ms"] / 1e3,
        "bound_share": bound / summary["duration"],
    }
    name = f"  {label} (B up to {batch})"
    print(
        f"{name:42}{found['makespan_s']:8.1f} s{found['idle_share']:8.2%}{found['busiest_idle_share']:9.2%}"
        f"{found['median_tbt_ms']:7.0f} ms{found['p99_tbt_ms']:7.0f} ms{found['p99_ttft_s']:8.1f} s"
        f"{found['bound_share']:9.1%}",
        flush=True,
    )
    return found


if __name__ == "__main__":
    main()
