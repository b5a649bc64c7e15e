"""Simulates what faults cost a cluster, with and without a spare: `python -m benchmarks.faults [KEY=VALUE ...]`.

GPT-3 over 8 x 8 A100s (the paper's 5.3) serves Figure 12's lengths at 5 requests/s for 80 minutes, about 70% of
what it carries, while each of its 64 ranks fails once a week, a day or an hour in the mean. `without` and `with a
spare` meet the same faults. In the first rows the parts of a repair are those of `simulation.faults`, measured with a
small model on two cores; in the others a start is assumed to take a minute, and loading weights half of one.

`down`: share of the time from a fault until the stages stand again. `again`: tokens whose KV was lost and computed
again, over all tokens that were computed; a copy of the KV on another rank could save these at most. `goodput`:
requests/s with a TTFT of 10 s and a TPOT of 200 ms at most. Overrides of `gapless simulate` go behind the options:
`model=llama2-70b workload.request_rate=8`. Three minutes at most; --requests bounds them.
"""

from __future__ import annotations

import argparse
from typing import Any

from gapless.conf.schema import SimulateConfig
from gapless.launch.compose import compose_one
from gapless.launch.turns import requests
from gapless.runtime.simulation.run import simulated
from gapless.runtime.simulation.setting import make_setting

from .support.results import add_json_option, write_json

SETTING = (
    "model=gpt3-175b",
    "hardware=a100-80g",
    "parallel=tp8_pp8",
    "workload=zipf",
    "workload.request_rate=5",
    "simulation.record=false",
    "slo.ttft_ms=10000",
    "slo.tpot_ms=200",
    "parallel.max_recoveries=1000000",
)
SLOW = ("simulation.faults.start_s=60", "simulation.faults.weights_s=30")
TIMES = {"a week": 604_800, "a day": 86_400, "an hour": 3_600}
TABLES = {
    "a start of 2.9 s, weights in 0.2 s": ((), ("never", *TIMES)),
    "a start of 60 s, weights in 30 s": (SLOW, ("a week", "a day")),
}
HEAD = (
    f"  {'a rank fails once':28}{'faults':>7}{'down':>8}{'again':>8}{'goodput':>9}{'p99 TTFT':>10}{'p99 TBT':>10}"
    f"{'p99 e2e':>10}"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--requests", type=int, default=24_000)
    add_json_option(parser)
    arguments = parser.parse_args()
    given = (*SETTING, f"workload.num_prompts={arguments.requests}", *arguments.overrides)
    rows = []
    for title, (repair, means) in TABLES.items():
        print(f"\n{title}\n{HEAD}", flush=True)
        for mean in means:
            for spares in (0,) if mean == "never" else (0, 1):
                keys = () if mean == "never" else (f"simulation.faults.rank_mtbf_s={TIMES[mean]}", *repair)
                name = f"{mean}, {'with a spare' if spares else 'without'}" if keys else mean
                found = row(*given, *keys, f"parallel.spares={spares}")
                print(text(name, found), flush=True)
                rows.append({"repair": title, "rank_fails": name, **found})
    write_json(arguments.json, "faults", {"faults": rows})


def row(*keys: str) -> dict[str, Any]:
    """Simulate a setting, and return its numbers."""
    config = compose_one(keys, SimulateConfig, "simulate")
    (replica,) = simulated(make_setting(config), requests(config)[0])
    assert replica.totals is not None
    summary = replica.totals.summary(replica.record)
    assert summary["completed"] == config.workload.num_prompts
    again = sum(fault["tokens"] for fault in summary["faults"])
    tokens = summary["total_input_tokens"] + summary["total_output_tokens"]
    return {
        "faults": len(summary["faults"]),
        "down_share": summary["recovery_seconds"] / summary["duration"],
        "again_share": again / (again + tokens),
        "goodput_requests_per_s": summary["request_goodput"],
        "p99_ttft_s": summary["p99_ttft_ms"] / 1e3,
        "p99_tbt_ms": summary["p99_itl_ms"],
        "p99_e2e_s": summary["p99_e2el_ms"] / 1e3,
        "makespan_s": summary["duration"],
    }


def text(name: str, found: dict[str, Any]) -> str:
    return (
        f"  {name:28}{found['faults']:7}{found['down_share']:8.2%}{found['again_share']:8.2%}"
        f"{found['goodput_requests_per_s']:7.2f}/s{found['p99_ttft_s']:8.1f} s{found['p99_tbt_ms']:7.0f} ms"
        f"{found['p99_e2e_s']:8.1f} s"
    )


if __name__ == "__main__":
    main()
