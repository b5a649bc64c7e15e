"""Times simulations of the paper's Figure 12 under `sarathi` and `equal_time`: `python -m benchmarks.speed`.

10,000 requests of GPT-3 over 8 stages of 8 A100s, without host overhead. Interleaved runs of each policy, from sources
and compiled (`python -m gapless.launch.compile`), each in its own process on one core. Prints the median, minimum and
maximum seconds over the rounds, the median per micro-batch, and the peak memory of a process. The time of a run is from
the first request to the last, with a warm cost-model cache for every number of tokens. About four minutes.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from functools import partial
from typing import Any

from .support.harness import Benchmark, by_turns, spread

FIGURE_12 = "model=gpt3-175b hardware=a100-80g parallel=tp8_pp8 workload=zipf scheduler.batch=27 simulation.host=false"
CODE = {"sources": "0", "compiled": "1"}  # the values of GAPLESS_COMPILED


def main() -> int:
    bench = Benchmark(__doc__, requests=10_000, rounds=3, one={"metavar": "POLICY", "help": "run in this process"})
    if bench.given.one:
        print(json.dumps(measure(bench.given.one, bench.given.requests)))
        return 0

    def run(policy: str, code: str) -> dict[str, Any]:
        command = [sys.executable, "-m", "benchmarks.speed", f"--one={policy}", f"--requests={bench.given.requests}"]
        environment = os.environ | {"GAPLESS_COMPILED": CODE[code]}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        found: dict[str, Any] = json.loads(done.stdout)
        if found["compiled"] != (code == "compiled"):
            raise SystemExit("not compiled: run python -m gapless.launch.compile")
        return found

    cases = [(policy, code) for policy in ("sarathi", "equal_time") for code in CODE]
    for (policy, code), runs in by_turns(bench.given.rounds, {case: partial(run, *case) for case in cases}).items():
        seconds = spread(run["seconds"] for run in runs)
        number = {key: runs[0][key] for key in ("micro_batches", "decodes")}
        each = {"median_us_per_micro_batch": seconds["median_s"] / number["micro_batches"] * 1e6}
        most = {"megabytes": max(run["megabytes"] for run in runs)}
        bench.row("runs", policy=policy, code=code, **number, **seconds, **each, **most)
    return bench.end()


def measure(policy: str, requests: int) -> dict[str, Any]:
    """Simulate one run in this process; return its time, counts and peak memory."""
    from gapless.launch.turns import requests as make_requests
    from gapless.runtime import compiled
    from gapless.runtime.simulation.cost.stage_costs import MicroBatchShape
    from gapless.runtime.simulation.pipeline.replicas import make_replicas, run_fleet
    from gapless.runtime.simulation.pipeline.setting import make_setting

    from .support.simulated import configure

    config = configure(FIGURE_12, f"scheduler={policy} workload.num_prompts={requests}")
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
