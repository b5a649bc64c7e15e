"""Simulates every policy from a quarter to 120% of saturation: `python -m benchmarks.loads`.

Three settings on A100s: LLaMA 13B over two stages, LLaMA 2 70B over two stages of four ranks, GPT-3 over eight stages
of eight. Saturation is what `token_budget` carries when all requests are there at once. For each load a line per
policy: requests/s, p50 and p99 of TTFT, p99 of TBT, and the share of stage time that is idle between a stage's first
and last micro-batch. The last line is `equal_time`'s beside the best of the policies that reach 99% of the best
throughput.
Overrides of `gapless simulate` go behind the options. Four minutes.
"""

from __future__ import annotations

import argparse
from typing import Any

from gapless.conf.policies import POLICY_CONFIGS
from gapless.conf.schema import SimulateConfig
from gapless.launch.compose import compose_one
from gapless.launch.turns import requests
from gapless.runtime.simulation.run import simulated
from gapless.runtime.simulation.setting import make_setting

from .support.results import add_json_option, write_json

SETTINGS = {
    "llama-13b pp2": ("model=llama-13b", "parallel=pp2", "workload=zipf", "workload.min_len=256",
                      "workload.max_len=1500"),
    "llama2-70b tp4_pp2": ("model=llama2-70b", "parallel=tp4_pp2", "workload=fixed", "workload.input_len=1024",
                           "workload.output_len=256"),
    "gpt3-175b tp8_pp8": ("model=gpt3-175b", "parallel=tp8_pp8", "workload=zipf"),
}  # fmt: skip
LOADS = (0.25, 0.5, 0.75, 0.95, 1.2)
_SAME = 0.99  # of the best throughput


def measured(*keys: str) -> dict[str, float]:
    """Simulate a setting; return what the table shows."""
    config = compose_one(("hardware=a100-80g", "simulation.record=false", *keys), SimulateConfig, "simulate")
    (replica,) = simulated(make_setting(config), requests(config)[0])
    assert replica.totals is not None
    found = replica.totals.summary(replica.record)
    return {
        "requests_per_s": found["request_throughput"], "p50_ttft_ms": found["median_ttft_ms"],
        "p99_ttft_ms": found["p99_ttft_ms"], "p99_tbt_ms": found["p99_itl_ms"],
        "inner_idle_share": found["bubble_fraction_inner"],
    }  # fmt: skip


def beside_the_best(rows: list[dict[str, Any]]) -> str:
    """How `equal_time` stands beside the best of the others that carry as much."""
    (own,) = (row for row in rows if row["policy"] == "equal_time")
    others = [row for row in rows if row is not own]
    most = max(row["requests_per_s"] for row in rows)
    peers = [row for row in others if row["requests_per_s"] >= _SAME * most]
    texts = [f"throughput {own['requests_per_s'] / max(row['requests_per_s'] for row in others):.2f}"]
    if not peers:
        return f"{texts[0]}, none carries as much"
    for key, name in (("p50_ttft_ms", "p50 TTFT"), ("p99_ttft_ms", "p99 TTFT"), ("p99_tbt_ms", "p99 TBT")):
        texts.append(f"{name} {own[key] / min(row[key] for row in peers):.2f}")
    least = min(row["inner_idle_share"] for row in others)
    return f"{', '.join(texts)}, inner idle {100 * (own['inner_idle_share'] - least):+.1f} points"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--requests", type=int, default=400)
    add_json_option(parser)
    arguments = parser.parse_args()
    rows = []
    for setting, keys in SETTINGS.items():
        given = (*keys, f"workload.num_prompts={arguments.requests}", *arguments.overrides)
        saturation = measured(*given, "scheduler=token_budget")["requests_per_s"]
        for load in LOADS:
            print(f"\n{setting}, {load:.0%} of {saturation:.2f} requests/s\n{'':16}{'requests/s':>11}{'p50 TTFT':>12}"
                  f"{'p99 TTFT':>12}{'p99 TBT':>12}{'inner idle':>12}")  # fmt: skip
            of_load = []
            for policy in POLICY_CONFIGS:
                found = measured(*given, f"scheduler={policy}", f"workload.request_rate={load * saturation}")
                of_load.append({"setting": setting, "load": load, "policy": policy, **found})
                print(f"{policy:16}{found['requests_per_s']:11.2f}{found['p50_ttft_ms']:9.0f} ms"
                      f"{found['p99_ttft_ms']:9.0f} ms{found['p99_tbt_ms']:9.1f} ms"
                      f"{found['inner_idle_share']:12.1%}", flush=True)  # fmt: skip
            print(f"equal_time beside the best: {beside_the_best(of_load)}")
            rows += of_load
    write_json(arguments.json, "loads", {"loads": rows})


if __name__ == "__main__":
    main()
