"""How fast simulations go: `python -m benchmarks.speed`, Figure 12 of the paper through `sarathi` and `equal_time`.

10,000 requests of GPT-3 over 8 stages of 8 A100s, without a host: each policy by turns from its sources and compiled
(`python -m gapless.launch.compile`), each run in a process of its own on one core. Prints medians over the rounds:
seconds from the first request to the last with the cost model warm (it has answered for every number of tokens once),
by micro-batch and by decode, and the most memory that the process ever had. About four minutes.
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
    for (policy, way), runs in found.items():
        seconds, first = [run["seconds"] for run in runs], runs[0]
        middle = statistics.median(seconds)
        print(
            f"{policy + ', ' + way:<22}{first['micro_batches']:>14,}{first['decodes']:>12,}{middle:>9.2f}"
            f"{min(seconds):>8.2f}{max(seconds):>8.2f}{middle / first['micro_batches'] * 1e6:>9.0f}"
            f"{max(run['megabytes'] for run in runs):>6.0f}"
        )
    return 0


def measure(policy: str, requests: int) -> dict[str, Any]:
    """One run in this process."""
    from gapless.conf.schema import SimulateConfig
    from gapless.launch.compose import compose_one
    from gapless.launch.turns import requests as make_requests
    from gapless.runtime import compiled
    from gapless.runtime.cost.make import make_costs
    from gapless.runtime.cost.stage_costs import MicroBatchShape
    from gapless.runtime.engine.plan import make_plan
    from gapless.runtime.simulation.replicas import make_replicas, run_fleet

    overrides = [*FIGURE_12, f"scheduler={policy}", f"workload.num_prompts={requests}"]
    config = compose_one(overrides, SimulateConfig, "simulate")
    workload, _ = make_requests(config)
    plan = make_plan(config)
    costs = make_costs(config, plan)
    for rows in range(1, 2 * plan.limits.tile + plan.limits.batch):
        costs.seconds(MicroBatchShape(((rows, 0),), 0, 0, min(rows, plan.limits.batch)))
    (replica,) = make_replicas(config, plan=plan, costs=costs)
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
