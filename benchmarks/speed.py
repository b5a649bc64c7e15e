"""Times simulations of Figure 12 of the paper under `sarathi` and `equal_time`: `python -m benchmarks.speed`.

10,000 requests of GPT-3 over 8 stages of 8 A100s, without host overhead. Each policy runs by turns from its sources and
compiled (`python -m gapless.launch.compile`), each run in a process of its own on one core. Prints the median, least
and most seconds over the rounds, the median divided by micro-batches, and the peak memory of a process. A run's seconds
are those from the first request to the last, after the cost model has answered once for every number of tokens. About
four minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

from .support.results import add_json_option, write_json

POLICIES = ("sarathi", "equal_time")
FIGURE_12 = (
    "model=gpt3-175b", "hardware=a100-80g", "parallel=tp8_pp8", "workload=zipf", "scheduler.batch=27",
    "simulation.host=false",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", metavar="POLICY", help=argparse.SUPPRESS)
    add_json_option(parser)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one, arguments.requests)))
        return 0
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for number in range(arguments.rounds):
        for policy in POLICIES:
            for way in ("0", "1"):
                command = [sys.executable, "-m", "benchmarks.speed", "--one", policy]
                command.append(f"--requests={arguments.requests}")
                environment = os.environ | {"GAPLESS_COMPILED": way}
                done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
                one = json.loads(done.stdout)
                if way == "1" and not one["compiled"]:
                    print("nothing is compiled: python -m gapless.launch.compile", file=sys.stderr)
                    return 2
                found.setdefault((policy, "compiled" if way == "1" else "sources"), []).append(one)
        print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr, flush=True)
    print(f"{'':<22}{'micro-batches':>14}{'decodes':>12}{'seconds':>9}{'least':>8}{'most':>8}{'us each':>9}{'MB':>6}")
    rows = []
    for (policy, code), runs in found.items():
        seconds, first = [run["seconds"] for run in runs], runs[0]
        row = {
            "policy": policy, "code": code, "micro_batches": first["micro_batches"], "decodes": first["decodes"],
            "median_s": statistics.median(seconds), "least_s": min(seconds), "most_s": max(seconds),
            "median_us_per_micro_batch": statistics.median(seconds) / first["micro_batches"] * 1e6,
            "megabytes": max(run["megabytes"] for run in runs),
        }  # fmt: skip
        rows.append(row)
        print(
            f"{policy + ', ' + code:<22}{row['micro_batches']:>14,}{row['decodes']:>12,}{row['median_s']:>9.2f}"
            f"{row['least_s']:>8.2f}{row['most_s']:>8.2f}{row['median_us_per_micro_batch']:>9.0f}"
            f"{row['megabytes']:>6.0f}"
        )
    write_json(arguments.json, "speed", {"runs": rows})
    return 0


def measure(policy: str, requests: int) -> dict[str, Any]:
    """Simulate one run in this process; its seconds, counts and peak memory."""
    from gapless.conf.schema import SimulateConfig
    from gapless.launch.compose import compose_one
    from gapless.launch.turns import requests as make_requests
    from gapless.runtime import compiled
    from gapless.runtime.cost.stage_costs import MicroBatchShape
    from gapless.runtime.simulation.replicas import make_replicas, run_fleet
    from gapless.runtime.simulation.setting import make_setting

    overrides = [*FIGURE_12, f"scheduler={policy}", f"workload.num_prompts={requests}"]
    config = compose_one(overrides, SimulateConfig, "simulate")
    workload, _ = make_requests(config)
    setting = make_setting(config)
    plan, costs = setting.plan, setting.costs
    for rows in range(1, 2 * plan.limits.tile + plan.limits.batch):
        costs.seconds(MicroBatchShape(((rows, 0),), 0, 0, min(rows, plan.limits.batch)))
    (replica,) = make_replicas(setting)
    start = time.perf_counter()
    for _ in run_fleet([replica], workload.without_prompts()):
        pass
    return {
        "compiled": compiled.in_use(),
        "seconds": time.perf_counter() - start,
        "micro_batches": len(replica.record.micro_batches),
        "decodes": sum(micro_batch.decode_tokens for micro_batch in replica.record.micro_batches),
        "megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


if __name__ == "__main__":
    sys.exit(main())
