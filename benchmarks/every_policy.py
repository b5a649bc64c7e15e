"""Simulates one workload under every policy, checks that each ends it and conserves time, and times each.

    python -m benchmarks.every_policy workload=trace workload.path=TRACE.csv.gz

Takes the overrides of `gapless simulate` and prints a row for each policy. Fails if a policy leaves a request
unfinished or the ledger does not add up. Writes no run folder. Seconds are CPU seconds of this process.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import Any

from gapless.conf.build import build, load_group
from gapless.conf.policies import POLICY_CONFIGS, SchedulerConfig
from gapless.conf.schema import SimulateConfig
from gapless.launch.compose import compose_one
from gapless.launch.turns import requests
from gapless.runtime.ledger.fleet import Fleet
from gapless.runtime.simulation.run import simulated
from gapless.runtime.simulation.setting import make_setting

from .support.results import add_json_option, write_json

DEFAULTS = ("model=llama2-70b", "parallel=tp4_pp2")
COLUMNS = ("simulated", "output/s", "p99 TTFT", "p99 TBT", "idle", "preempted", "batches", "seconds", "requests/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json_option(parser)
    arguments, overrides = parser.parse_known_args()
    config = compose_one([*DEFAULTS, *overrides], SimulateConfig, "simulate")
    workload, context = requests(config)
    print(f"{len(workload)} requests, {workload.num_cut} cut to a context of {context} tokens; {config.model.name}, "
          f"pp={config.parallel.pp} tp={config.parallel.tp}")  # fmt: skip
    print(f"{'':16}" + "".join(f"{name:>11}" for name in COLUMNS))
    rows = []
    for name in POLICY_CONFIGS:
        policy = build(SchedulerConfig, load_group("scheduler", name), "scheduler")
        rows.append({"policy": name, **simulate(replace(config, scheduler=policy))})
        print(f"{name:16}" + "".join(f"{value:>11}" for value in cells(rows[-1])), flush=True)
    write_json(arguments.json, "every_policy", {"policies": rows})


def simulate(config: SimulateConfig) -> dict[str, Any]:
    """The figures of one policy's run, checked."""
    workload, _ = requests(config)
    start = time.process_time()
    fleet = Fleet([replica.record for replica in simulated(make_setting(config), workload)])
    seconds = time.process_time() - start
    ended = sum(request.finished is not None for record in fleet.records for request in record.requests)
    assert ended == len(workload), f"{config.scheduler.name}: {ended} of {len(workload)} requests ended"
    fleet.check()
    summary = fleet.summarize()
    assert summary["total_output_tokens"] == int(workload.output_lens.sum())
    assert summary["failed"] == 0
    return {
        "makespan_s": summary["duration"],
        "output_tokens_per_s": summary["output_throughput"],
        "p99_ttft_s": summary["p99_ttft_ms"] / 1e3,
        "p99_tbt_ms": summary["p99_itl_ms"],
        "idle_share": summary["bubble_fraction_inner"],
        "preemptions": summary["preemptions"],
        "micro_batches": summary["micro_batches"],
        "cpu_s": seconds,
        "requests_per_cpu_s": ended / seconds,
    }


def cells(row: dict[str, Any]) -> list[str]:
    return [
        f"{row['makespan_s']:.0f} s", f"{row['output_tokens_per_s']:.0f}", f"{row['p99_ttft_s']:.2f} s",
        f"{row['p99_tbt_ms']:.0f} ms", f"{row['idle_share']:.1%}", str(row["preemptions"]),
        str(row["micro_batches"]), f"{row['cpu_s']:.1f}", f"{row['requests_per_cpu_s']:.0f}",
    ]  # fmt: skip


if __name__ == "__main__":
    main()
