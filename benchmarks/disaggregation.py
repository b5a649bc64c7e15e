"""Simulates prefill and decode pools beside replicas that do both: `python -m benchmarks.disaggregation`.

LLaMA 2 70B on 16 A100s, four replicas of four ranks: all with chunked prefills, or one to three of them as a prefill
pool. For each workload a line per setting: the highest of the rates 0.25, 0.27, 0.30, ... requests/s (each 1.1 times
the one before) at which 90% of requests have their first token within 2 s and the others within 50 or within 100 ms
each on average (TPOT); and at one rate for all, p99 of TTFT, of TBT and of what a KV cache waits and moves. Arrivals
are a Poisson process. The network is InfiniBand with 200 Gbit/s a GPU, in the last setting Ethernet with 25 Gbit/s a
node (its rate is assumed: 0.9 of the line's).
Overrides of `gapless simulate` go behind the options. Five to ten minutes with the compiled control path.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from gapless.conf.schema import SimulateConfig
from gapless.conf.workloads import SloConfig
from gapless.launch.compose import compose_one
from gapless.launch.turns import requests
from gapless.runtime.ledger.fleet import Fleet
from gapless.runtime.ledger.slo import meets
from gapless.runtime.simulation.run import simulated
from gapless.runtime.simulation.setting import make_setting

from .support.results import add_json_option, write_json

SETTING = ("model=llama2-70b", "hardware=a100-80g", "parallel.tp=4", "parallel.pp=1", "workload=fixed")
WORKLOADS = {  # prompt and output tokens, and the rate for all
    "256 in, 512 out": (256, 512, 4.0),
    "1024 in, 256 out": (1024, 256, 4.0),
    "3584 in, 128 out": (3584, 128, 1.5),
}
MIXED = "simulation.replicas=4"
POOLS = {
    f"{prefill} prefill, {4 - prefill} decode": (
        f"simulation.disaggregation.prefill_replicas={prefill}", f"simulation.replicas={4 - prefill}",
        "scheduler=sarathi",
    )
    for prefill in (1, 2, 3)
}  # fmt: skip
SETTINGS = {
    "4 token_budget 512": (MIXED, "scheduler=token_budget", "scheduler.budget=512"),
    "4 token_budget 1024": (MIXED, "scheduler=token_budget", "scheduler.budget=1024"),
    "4 sarathi 256": (MIXED, "scheduler=sarathi"),
    "4 equal_time 256": (MIXED, "scheduler=equal_time"),
    **POOLS,
    "2 and 2, 25 Gbit/s": (*POOLS["2 prefill, 2 decode"], "cluster=ethernet-25g"),
}  # fmt: skip
SLOS = {bound: SloConfig(ttft_ms=2000.0, tpot_ms=bound) for bound in (50.0, 100.0)}
RATES = [0.25 * 1.1**step for step in range(56)]
_SHARE = 0.9  # of the requests, that must meet the SLO


def simulate(*keys: str) -> Fleet:
    config = compose_one((*SETTING, *keys), SimulateConfig, "simulate")
    setting = make_setting(config)
    replicas = simulated(setting, requests(config, {config.scheduler: setting.plan})[0])
    num_prefill = config.simulation.disaggregation.prefill_replicas or 0
    return Fleet([replica.record for replica in replicas], num_prefill=num_prefill)


def share_within(fleet: Fleet, slo: SloConfig) -> float:
    """The share of requests that met the SLO."""
    met = [meets(request, slo) for request, _ in fleet.served]
    return sum(met) / len(met)


def highest(is_met: Callable[[int], bool]) -> float:
    """The highest rate at which the SLO is met, 0 where it is met at none; taken to be met at all lower rates."""
    low, high = -1, len(RATES)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_met(middle) else (low, middle)
    return RATES[low] if low >= 0 else 0.0


def row(workload: str, setting: str, *more: str) -> dict[str, Any]:
    prompt, output, rate = WORKLOADS[workload]
    given = (*SETTINGS[setting], f"workload.input_len={prompt}", f"workload.output_len={output}", *more)
    known: dict[int, dict[float, float]] = {}

    def is_met(step: int, bound: float) -> bool:
        if step not in known:
            fleet = simulate(*given, f"workload.request_rate={RATES[step]}")
            known[step] = {bound: share_within(fleet, slo) for bound, slo in SLOS.items()}
        return known[step][bound] >= _SHARE

    found: dict[str, Any] = {"workload": workload, "setting": setting}
    found |= {f"rate_tpot_{bound:.0f}_ms": highest(lambda step, bound=bound: is_met(step, bound)) for bound in SLOS}
    fleet = simulate(*given, f"workload.request_rate={rate}")
    summary = fleet.summarize()
    found |= {"at_rate": rate, "p99_ttft_ms": summary["p99_ttft_ms"], "p99_tbt_ms": summary["p99_itl_ms"]}
    return found | {key: summary.get(key) for key in ("p99_kv_wait_ms", "p99_kv_transfer_ms")}


def text(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--requests", type=int, default=1500)
    add_json_option(parser)
    arguments = parser.parse_args()
    rows = []
    for workload, (*_, rate) in WORKLOADS.items():
        at = f"at {rate:.1f}/s: p99 TTFT"
        print(f"\n{workload:22}{'TPOT 50 ms':>12}{'100 ms':>10}{at:>24}{'TBT':>11}{'KV waits':>12}{'KV moves':>11}")
        for setting in SETTINGS:
            found = row(workload, setting, f"workload.num_prompts={arguments.requests}", *arguments.overrides)
            rows.append(found)
            print(f"{setting:22}{found['rate_tpot_50_ms']:10.2f}/s{found['rate_tpot_100_ms']:8.2f}/s"
                  f"{text(found['p99_ttft_ms']):>24}{text(found['p99_tbt_ms']):>11}{text(found['p99_kv_wait_ms']):>12}"
                  f"{text(found['p99_kv_transfer_ms']):>11}", flush=True)  # fmt: skip
    write_json(arguments.json, "disaggregation", {"disaggregation": rows})


if __name__ == "__main__":
    main()
