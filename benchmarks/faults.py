"""Simulates what faults cost a cluster, with and without a spare: `python -m benchmarks.faults [KEY=VALUE ...]`.

GPT-3 over 8 x 8 A100s (the paper's 5.3) serves Figure 12's lengths at 5 requests/s for 80 minutes, about 70% of
what it carries, while each of its 64 ranks fails once a week, a day or an hour in the mean. `without` and `with a
spare` meet the same faults. In the first rows the parts of a repair are those of `simulation.faults`, measured with a
small model on two cores; in the others a start is assumed to take a minute, and loading weights half of one.

`down`: share of the time from a fault until the stages stand again. `again`: tokens whose KV was lost and computed
again, over all tokens that were computed; a copy of the KV on another rank could save these at most. `goodput`:
requests/s with a TTFT of 10 s and a TPOT of 200 ms at most. Three minutes at most; --requests bounds them.

`--copies` simulates what such a copy costs while nothing fails, with each stage's blocks on the next stage's ranks too:
a send of all new keys and values to the neighbour, and the memory that they take there. The same requests come at about
70, 95 and 120% of what the cluster carries: as it is; with a network that is as much slower as the copies make each
message longer; and with half the KV blocks beside that. A minute and a half (`--requests 6000`).
"""

from __future__ import annotations

import sys

from gapless.runtime.engine.plan import make_plan

from .support.harness import Benchmark, Row, figures
from .support.simulated import configure, replicas_of

SETTING = (
    "model=gpt3-175b hardware=a100-80g parallel=tp8_pp8 workload=zipf workload.request_rate=5 simulation.record=false "
    "slo.ttft_ms=10000 slo.tpot_ms=200 parallel.max_recoveries=1000000"
)
SLOW = "simulation.faults.start_s=60 simulation.faults.weights_s=30"
TIMES = {"a week": 604_800, "a day": 86_400, "an hour": 3_600}
TABLES = {
    "a start of 2.9 s, weights in 0.2 s": ([], ["never", *TIMES]),
    "a start of 60 s, weights in 30 s": ([SLOW], ["a week", "a day"]),
}
RATES = (5, 7, 9)


def main() -> int:
    bench = Benchmark(__doc__, requests=24_000, copies=False, overrides=True)
    given = (SETTING, f"workload.num_prompts={bench.given.requests}", *bench.given.overrides)
    (copies if bench.given.copies else faults)(bench, *given)
    return bench.end()


def faults(bench: Benchmark, *given: str) -> None:
    for title, (repair, means) in TABLES.items():
        for mean in means:
            keys = [] if mean == "never" else [f"simulation.faults.rank_mtbf_s={TIMES[mean]}", *repair]
            for spares in (0, 1) if keys else (0,):
                name = f"{mean}, {'with a spare' if spares else 'without'}" if keys else mean
                found = simulate(*given, *keys, f"parallel.spares={spares}")
                bench.row("faults", repair=title, rank_fails=name, **found)


def copies(bench: Benchmark, *given: str) -> None:
    config = configure(*given)
    costs = config.hardware.costs
    if costs is None:
        bench.parser.error(f"hardware={config.hardware.name}: its network is not known; choose an a100 or h100")
    plan = make_plan(config)
    per_token = 2 * max(len(layers) for layers in plan.layers)  # keys and values, in vectors of the hidden size
    slower = f"hardware.costs.network.gigabytes_per_s={costs.network.gigabytes_per_s / (1 + per_token)}"
    variants = {
        "no copies": [],
        f"a network {1 + per_token} times as slow": [slower],
        "half the KV blocks beside it": [slower, f"cache.num_blocks={plan.num_blocks // 2}"],
    }
    for rate in RATES:
        for name, keys in variants.items():
            found = simulate(*given, f"workload.request_rate={rate}", *keys)
            bench.row("kv_copies", rate=rate, variant=name, **found)


def simulate(*keys: str) -> Row:
    """Simulate a setting, and return its numbers."""
    config = configure(*keys)
    (replica,) = replicas_of(config)
    assert replica.totals is not None
    summary = replica.totals.summary(replica.record)
    assert summary["completed"] == config.workload.num_prompts
    again = sum(fault["tokens"] for fault in summary["faults"])
    tokens = summary["total_input_tokens"] + summary["total_output_tokens"]
    return {
        "faults": len(summary["faults"]),
        "down_share": summary["recovery_seconds"] / summary["duration"],
        "again_share": again / (again + tokens),
        **figures(summary, "goodput_requests_per_s", "p99_ttft_s", "p99_tbt_ms", "p99_e2e_s", "makespan_s"),
    }


if __name__ == "__main__":
    sys.exit(main())
