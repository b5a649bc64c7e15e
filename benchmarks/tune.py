"""Compares `gapless tune` with brute force, in capacity found and in simulations: `python -m benchmarks.tune`.

Six questions differ in model, device, lengths and SLO. Each is searched as `gapless tune` does, and once more with the
capacity of every setting on the whole workload (`search.exhaustive=true`). The race can find more than brute force: it
also tries chunks between those of `search.chunk`. About seven minutes on one core.

Overrides of `gapless tune` go behind the options.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace

from gapless.conf.tuning import TuneConfig
from gapless.launch.compose import compose_one
from gapless.runtime.tuning.search import Search
from gapless.runtime.tuning.search_result import TriedCandidate

from .support.harness import Benchmark, words

COMMON = (
    "nodes=1 scheduler=sarathi,equal_time,orca_best search.chunk=[128,512,2048] workload=fixed workload.num_prompts=120"
)
KEYS = (
    "model={} hardware={} cluster.devices_per_node={} workload.input_len={} workload.output_len={} "
    "workload.range_ratio={} slo.ttft_p99_ms={} slo.tbt_p99_ms={}"
)
QUESTIONS = {
    "llama-7b, 2 A100: 900 in, 40 out": ("llama-7b", "a100-80g", 2, 900, 40, 0.6, 1000, 60),
    "llama-7b, 2 A100: 200 in, 200 out": ("llama-7b", "a100-80g", 2, 200, 200, 0.8, 1000, 40),
    "llama-13b, 4 A100: 1,500 in, 60 out": ("llama-13b", "a100-80g", 4, 1500, 60, 0.8, 2000, 80),
    "llama-33b, 4 A100, TTFT alone": ("llama-33b", "a100-80g", 4, 1000, 50, 0.5, 4000, "null"),
    "mistral-7b, 2 H100, TBT alone": ("mistral-7b", "h100", 2, 3000, 80, 0.5, "null", 50),
    "qwen3-8b, 4 A6000: 600 in, 100 out": ("qwen3-8b", "a6000", 4, 600, 100, 0.7, 3000, 120),
}


def main() -> int:
    bench = Benchmark(__doc__, overrides=True)
    for name, values in QUESTIONS.items():
        config = compose_one(words(COMMON, KEYS.format(*values), *bench.given.overrides), TuneConfig, "tune")
        race, start = Search(config), time.process_time()
        won, between = best(race.race()), time.process_time()
        brute = Search(replace(config, search=replace(config.search, exhaustive=True)))
        every, end = brute.exhaust(), time.process_time()
        most = best(every)
        bench.row(
            "questions",
            question=name,
            race_requests_per_s=won,
            exhaustive_requests_per_s=most,
            behind_share=1 - won / most,
            settings=len(every),
            race_simulations=race.simulations,
            exhaustive_simulations=brute.simulations,
            race_simulated_requests=race.requests,
            exhaustive_simulated_requests=brute.requests,
            race_cpu_s=between - start,
            exhaustive_cpu_s=end - between,
        )
    return bench.end()


def best(tried: list[TriedCandidate]) -> float:
    """Return the highest capacity on the whole workload, requests/s."""
    return max(one.low for one in tried if one.rung == "whole")


if __name__ == "__main__":
    sys.exit(main())
