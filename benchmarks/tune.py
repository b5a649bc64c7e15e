"""Compares `gapless tune` with brute force, in capacity found and in simulations: `python -m benchmarks.tune`.

Six questions differ in model, device, lengths and SLO. Each is searched as `gapless tune` does, and once more with the
capacity of every setting on the whole workload (`search.exhaustive=true`). The race can find more than brute force: it
also tries chunks between those of `search.chunk`. About seven minutes on one core.

Further arguments are overrides of `gapless tune`.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

from gapless.conf.tuning import TuneConfig
from gapless.launch.compose import compose_one
from gapless.runtime.tuning.search import Search
from gapless.runtime.tuning.search_result import TriedCandidate

from .support.results import add_json_option, write_json

COMMON = (
    "nodes=1", "scheduler=sarathi,equal_time,orca_best", "search.chunk=[128,512,2048]", "workload=fixed",
    "workload.num_prompts=120",
)  # fmt: skip


def lengths(prompt: int, output: int, spread: float) -> tuple[str, ...]:
    return f"workload.input_len={prompt}", f"workload.output_len={output}", f"workload.range_ratio={spread}"


def slo(ttft_ms: int | None, tbt_ms: int | None) -> tuple[str, ...]:
    bounds = {"ttft_p99_ms": ttft_ms, "tbt_p99_ms": tbt_ms}
    return tuple(f"slo.{key}={'null' if value is None else value}" for key, value in bounds.items())


QUESTIONS = {
    "llama-7b, 2 A100: 900 in, 40 out": (
        "model=llama-7b", "cluster.devices_per_node=2", *lengths(900, 40, 0.6), *slo(1000, 60),
    ),
    "llama-7b, 2 A100: 200 in, 200 out": (
        "model=llama-7b", "cluster.devices_per_node=2", *lengths(200, 200, 0.8), *slo(1000, 40),
    ),
    "llama-13b, 4 A100: 1,500 in, 60 out": (
        "model=llama-13b", "cluster.devices_per_node=4", *lengths(1500, 60, 0.8), *slo(2000, 80),
    ),
    "llama-33b, 4 A100, TTFT alone": (
        "model=llama-33b", "cluster.devices_per_node=4", *lengths(1000, 50, 0.5), *slo(4000, None),
    ),
    "mistral-7b, 2 H100, TBT alone": (
        "model=mistral-7b", "hardware=h100", "cluster.devices_per_node=2", *lengths(3000, 80, 0.5), *slo(None, 50),
    ),
    "qwen3-8b, 4 A6000: 600 in, 100 out": (
        "model=qwen3-8b", "hardware=a6000", "cluster.devices_per_node=4", *lengths(600, 100, 0.7), *slo(3000, 120),
    ),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json_option(parser)
    arguments, overrides = parser.parse_known_args()
    columns = ("requests/s", "best", "behind", "settings", "simulations", "requests simulated", "CPU")
    print(f"{'':<38}" + "".join(f"{name:>{width(name)}}" for name in columns))
    rows = []
    for name, question in QUESTIONS.items():
        config = compose_one([*COMMON, *question, *overrides], TuneConfig, "tune")
        start = time.process_time()
        raced = Search(config)
        won = best(raced.race())
        between = time.process_time()
        brute = Search(replace(config, search=replace(config.search, exhaustive=True)))
        every = brute.exhaust()
        end = time.process_time()
        most = best(every)
        values = (
            f"{won:.2f}", f"{most:.2f}", f"{1 - won / most:.1%}", str(len(every)),
            f"{raced.simulations} / {brute.simulations}", f"{raced.requests:,} / {brute.requests:,}",
            f"{between - start:.1f} / {end - between:.1f} s",
        )  # fmt: skip
        cells = "".join(f"{value:>{width(column)}}" for column, value in zip(columns, values, strict=True))
        print(f"{name:<38}{cells}", flush=True)
        rows.append({
            "question": name, "race_requests_per_s": won, "exhaustive_requests_per_s": most,
            "behind_share": 1 - won / most, "settings": len(every),
            "race_simulations": raced.simulations, "exhaustive_simulations": brute.simulations,
            "race_simulated_requests": raced.requests, "exhaustive_simulated_requests": brute.requests,
            "race_cpu_s": between - start, "exhaustive_cpu_s": end - between,
        })  # fmt: skip
    write_json(arguments.json, "tune", {"questions": rows})


def best(tried: list[TriedCandidate]) -> float:
    """The highest capacity on the whole workload, requests/s."""
    return max(one.low for one in tried if one.rung == "whole")


def width(column: str) -> int:
    return max(len(column) + 2, 18)


if __name__ == "__main__":
    main()
