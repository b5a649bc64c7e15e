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

import sys
from functools import cache, partial

from gapless.conf.workloads import SloConfig
from gapless.runtime.ledger.slo import meets
from gapless.runtime.ledger.summary import summarize

from .support.harness import Benchmark, Row, figures
from .support.simulated import configure, fleet_of

SETTING = "model=llama2-70b hardware=a100-80g parallel.tp=4 parallel.pp=1 workload=fixed"
WORKLOADS = {  # prompt and output tokens, and the rate for all
    "256 in, 512 out": (256, 512, 4.0),
    "1024 in, 256 out": (1024, 256, 4.0),
    "3584 in, 128 out": (3584, 128, 1.5),
}
POOLS = {
    f"{prefill} prefill, {4 - prefill} decode": f"simulation.disaggregation.prefill_replicas={prefill} "
    f"simulation.replicas={4 - prefill} scheduler=sarathi"
    for prefill in (1, 2, 3)
}
SETTINGS = {
    "4 token_budget 512": "simulation.replicas=4 scheduler=token_budget scheduler.budget=512",
    "4 token_budget 1024": "simulation.replicas=4 scheduler=token_budget scheduler.budget=1024",
    "4 sarathi 256": "simulation.replicas=4 scheduler=sarathi",
    "4 equal_time 256": "simulation.replicas=4 scheduler=equal_time",
    **POOLS,
    "2 and 2, 25 Gbit/s": f"{POOLS['2 prefill, 2 decode']} cluster=ethernet-25g",
}
SLOS = {bound: SloConfig(ttft_ms=2000.0, tpot_ms=bound) for bound in (50.0, 100.0)}
RATES = [0.25 * 1.1**step for step in range(56)]
_SHARE = 0.9  # of the requests, that must meet the SLO


def simulate(given: tuple[str, ...], rate: float) -> tuple[Row, dict[float, float]]:
    """Return the figures at a rate, and the share of requests that met each SLO."""
    fleet = fleet_of(configure(SETTING, *given, f"workload.request_rate={rate}"))
    met = {bound: [meets(request, slo) for request, _ in fleet.served] for bound, slo in SLOS.items()}
    summary = summarize(fleet)
    moved = {key: summary.get(key) for key in ("p99_kv_wait_ms", "p99_kv_transfer_ms")}
    shares = {bound: sum(each) / len(each) for bound, each in met.items()}
    return {"at_rate": rate, **figures(summary, "p99_ttft_ms", "p99_tbt_ms"), **moved}, shares


def main() -> int:
    bench = Benchmark(__doc__, requests=1500, overrides=True)
    number = f"workload.num_prompts={bench.given.requests}"
    for workload, (prompt, output, rate) in WORKLOADS.items():
        lengths = f"workload.input_len={prompt} workload.output_len={output}"
        for name, keys in SETTINGS.items():
            at = cache(partial(simulate, (keys, lengths, number, *bench.given.overrides)))

            def highest(bound: float, at=at) -> float:
                """Return the highest rate at which the SLO is met, or 0; lower rates are taken to meet it."""
                low, high = -1, len(RATES)
                while high - low > 1:
                    middle = (low + high) // 2
                    low, high = (middle, high) if at(RATES[middle])[1][bound] >= _SHARE else (low, middle)
                return RATES[low] if low >= 0 else 0.0

            rates = {f"rate_tpot_{bound:.0f}_ms": highest(bound) for bound in SLOS}
            bench.row("disaggregation", workload=workload, setting=name, **rates, **at(rate)[0])
    return bench.end()


if __name__ == "__main__":
    sys.exit(main())
