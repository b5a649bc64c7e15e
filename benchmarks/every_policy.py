"""One workload through every policy on a simulated cluster: does each end it, is time conserved, how long does it take?

    python -m benchmarks.every_policy workload=trace workload.path=TRACE.csv.gz

takes the overrides of `gapless simulate`, and prints a row a policy as it ends. It fails where a policy leaves a
request unfinished or the ledger does not add up. No run folder is written. Seconds are of this process.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace

from gapless.conf.build import build, load_group
from gapless.conf.policies import POLICY_CONFIGS, SchedulerConfig
from gapless.conf.schema import SimulateConfig
from gapless.launch.compose import compose_one
from gapless.launch.turns import requests
from gapless.runtime.ledger.fleet import Fleet
from gapless.runtime.simulation.replicas import simulated

DEFAULTS = ("model=llama2-70b", "parallel=tp4_pp2")
COLUMNS = ("simulated", "output/s", "p99 TTFT", "p99 TBT", "idle", "preempted", "batches", "seconds", "requests/s")


def main(arguments: list[str]) -> None:
    config = compose_one([*DEFAULTS, *arguments], SimulateConfig, "simulate")
    workload, context = requests(config)
    print(f"{len(workload)} requests, {workload.num_cut} cut to a context of {context} tokens; {config.model.name}, "
          f"pp={config.parallel.pp} tp={config.parallel.tp}")  # fmt: skip
    print(f"{'':16}" + "".join(f"{name:>11}" for name in COLUMNS))
    for name in POLICY_CONFIGS:
        policy = build(SchedulerConfig, load_group("scheduler", name), "scheduler")
        values = row(replace(config, scheduler=policy))
        print(f"{name:16}" + "".join(f"{value:>11}" for value in values), flush=True)


def row(config: SimulateConfig) -> list[str]:
    """What one policy comes to."""
    workload, _ = requests(config)
    start = time.process_time()
    fleet = Fleet([replica.record for replica in simulated(config, workload)])
    seconds = time.process_time() - start
    ended = sum(request.finished is not None for record in fleet.records for request in record.requests)
    assert ended == len(workload), f"{config.scheduler.name}: {ended} of {len(workload)} requests ended"
    fleet.check()
    summary = fleet.summarize()
    assert summary["total_output_tokens"] == int(workload.output_lens.sum())
    assert summary["failed"] == 0
    return [
        f"{summary['duration']:.0f} s", f"{summary['output_throughput']:.0f}", f"{summary['p99_ttft_ms'] / 1e3:.2f} s",
        f"{summary['p99_itl_ms']:.0f} ms", f"{summary['bubble_fraction_inner']:.1%}", str(summary["preemptions"]),
        str(summary["micro_batches"]), f"{seconds:.1f}", f"{ended / seconds:.0f}",
    ]  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
