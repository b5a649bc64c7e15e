"""Compares `equal_time` with `sarathi` on a simulated cluster: `python -m benchmarks.equal_time [--trace FILE]`.

GPT-3 over 8 x 8 A100s (paper 5.3, B = 27, chunk 256) serves Figure 12's lengths, first with all requests there at the
start, then at shares of the rate that `sarathi` sustains. A trace in Azure's form adds its requests, all there at the
start, where each policy has the B that memory allows. Prints the makespan; the idle share of all stages without
`starved` and `fill_drain`; the idle share of the busiest stage with all causes; latencies; and the makespan of the same
work without any bubble over the policy's makespan. A minute and a half for 10,000 requests; --requests bounds them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gapless.conf.policies import EqualTimeConfig, SarathiConfig, SchedulerConfig
from gapless.conf.workloads import TraceConfig, WorkloadConfig
from gapless.launch.turns import labels, requests
from gapless.runtime.ledger.fleet import Fleet
from gapless.runtime.ledger.summary import summarize

from .paper.bound import bubble_free_seconds
from .support.harness import Benchmark, figures
from .support.simulated import configure, replicas_of

SETTING = (
    "model=gpt3-175b hardware=a100-80g parallel=tp8_pp8 workload=zipf simulation.host=false simulation.last_layer=all"
)


def main() -> int:
    bench = Benchmark(__doc__, requests=10_000, trace={"metavar": "FILE"})
    given, config = bench.given, configure(SETTING, f"workload.num_prompts={bench.given.requests}")

    def compare(arrivals: str, workload: WorkloadConfig, policies: Sequence[SchedulerConfig]) -> list[dict[str, Any]]:
        return [
            bench.row("policies", arrivals=arrivals, policy=label, **measure(workload, policy))
            for label, policy in zip(labels(policies), policies, strict=True)
        ]

    def measure(workload: WorkloadConfig, policy: SchedulerConfig) -> dict[str, Any]:
        of_policy = replace(config, workload=workload, scheduler=policy)
        items, _ = requests(of_policy)
        (replica,) = replicas_of(of_policy, items)
        summary = summarize(Fleet([replica.record]))
        batch = max(len(micro_batch.decodes) for micro_batch in replica.record.micro_batches)
        bound = bubble_free_seconds(replica.pipeline.costs, items.input_lens, items.output_lens, batch)
        return {
            "most_decodes": batch,
            **figures(summary, "makespan_s"),
            "idle_share": summary["bubble_fraction_inner"],
            "busiest_idle_share": 1 - max(summary["stage_busy_fraction"]),
            **figures(summary, "median_tbt_ms", "p99_tbt_ms", "p99_ttft_s"),
            "bound_share": bound / summary["duration"],
        }

    alike = SarathiConfig(batch=27), EqualTimeConfig(batch=27), EqualTimeConfig(batch=27, iterations=None)
    rows = compare(f"Figure 12, {given.requests} requests at once", config.workload, alike)
    for share in (0.95, 0.8):
        rate = share * given.requests / rows[0]["makespan_s"]
        some = replace(config.workload, num_prompts=max(1, given.requests // 5), request_rate=rate)
        compare(f"{share:.0%} of the rate that sarathi sustains: {rate:.2f} requests/s", some, alike)
    if given.trace:
        trace = TraceConfig(path=given.trace, num_prompts=given.requests, request_rate=float("inf"))
        by_memory = SarathiConfig(), EqualTimeConfig(), EqualTimeConfig(iterations=None)
        compare("the trace, all at once", trace, by_memory)
    return bench.end()


if __name__ == "__main__":
    sys.exit(main())
