"""What equal time is worth over equal tokens: `python -m benchmarks.equal_time [TRACE.csv.gz]`, simulated.

GPT-3 over 8 x 8 A100s (paper 5.3, B = 27, chunk 256), `sarathi` and `equal_time`: on Figure 12's lengths, all
requests there at the start, then at shares of the rate that `sarathi` sustains; and where a trace is given (Azure's
form) on its requests, all there at the start, each policy with the B that the memory gives it. Prints makespan, idle
share without starved and fill_drain (of all stages, and all that the busiest idles), latencies, and how near each comes
to the time that the same work takes without any bubble. Under a minute for 10,000 requests; --requests bounds them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from gapless.conf.policies import EqualTimeConfig, SarathiConfig, SchedulerConfig
from gapless.conf.schema import SimulateConfig
from gapless.conf.workloads import TraceConfig, WorkloadConfig
from gapless.launch.compose import compose_one
from gapless.launch.turns import requests
from gapless.runtime.experiments.bound import bubble_free_seconds
from gapless.runtime.ledger.ledger import Ledger
from gapless.runtime.ledger.summary import summarize
from gapless.runtime.simulation.replicas import simulated

SETTING = ("model=gpt3-175b", "hardware=a100-80g", "parallel=tp8_pp8", "workload=zipf", "simulation.host=false")
HEAD = f"{'':28}{'makespan':>10}{'idle':>8}{'busiest':>9}{'p50 TBT':>10}{'p99 TBT':>10}{'p99 TTFT':>10}{'bound':>9}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", nargs="?")
    parser.add_argument("--requests", type=int, default=10_000)
    arguments = parser.parse_args()
    config = compose_one(SETTING, SimulateConfig, "simulate")
    config = replace(config, workload=replace(config.workload, num_prompts=arguments.requests))
    alike = SarathiConfig(batch=27), EqualTimeConfig(batch=27)

    sarathi, _ = compare(f"Figure 12, {arguments.requests} requests at once", config, config.workload, alike)
    for share in (0.95, 0.8):
        rate = share * arguments.requests / sarathi
        some = replace(config.workload, num_prompts=max(1, arguments.requests // 5), request_rate=rate)
        compare(f"{share:.0%} of the rate that sarathi sustains: {rate:.2f} requests/s", config, some, alike)
    if arguments.trace:
        trace = TraceConfig(path=arguments.trace, num_prompts=arguments.requests, request_rate=float("inf"))
        compare("the trace, all at once", config, trace, (SarathiConfig(), EqualTimeConfig()))


def compare(
    title: str, config: SimulateConfig, workload: WorkloadConfig, policies: Sequence[SchedulerConfig]
) -> list[float]:
    """Prints a row a policy; their makespans, in seconds."""
    print(f"\n{title}\n{HEAD}")
    return [row(replace(config, workload=workload, scheduler=policy)) for policy in policies]


def row(config: SimulateConfig) -> float:
    items, _ = requests(config)
    (replica,) = simulated(config, items)
    ledger = Ledger(replica.record)
    summary = summarize(replica.record, ledger)
    batch = max(len(micro_batch.decodes) for micro_batch in replica.record.micro_batches)
    bound = bubble_free_seconds(replica.pipeline.costs, items.input_lens, items.output_lens, batch)
    busiest = max(summary["stage_busy_fraction"])
    name = f"  {config.scheduler.name} (B up to {batch})"
    print(
        f"{name:28}{summary['duration']:8.1f} s{summary['bubble_fraction_inner']:8.2%}{1 - busiest:9.2%}"
        f"{summary['median_itl_ms']:7.0f} ms{summary['p99_itl_ms']:7.0f} ms{summary['p99_ttft_ms'] / 1e3:8.1f} s"
        f"{bound / summary['duration']:9.1%}",
        flush=True,
    )
    return float(summary["duration"])


if __name__ == "__main__":
    main()
