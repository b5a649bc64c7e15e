"""Compares `scheduler.chunk=auto` with the best fixed chunk.

    python -m benchmarks.chunk [--trace FILE]

Simulates each setting under `sarathi` and `equal_time` with chunks of 128 to 2,048 tokens and with `auto`, and prints
makespan, p99 TBT and median TTFT of the default chunk, of the fastest one and of `auto`. At a rate that the cluster
can serve, the arrivals decide the makespan, and the chunk decides TTFT and TBT. `--trace` adds a trace that
`workload=trace` reads as one more setting. All times are simulated, so they do not depend on the machine.
"""

from __future__ import annotations

import argparse
import os
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

from gapless.conf.schema import SimulateConfig
from gapless.launch.compose import compose_one
from gapless.launch.turns import requests
from gapless.runtime.ledger.fleet import Fleet
from gapless.runtime.simulation.run import simulated
from gapless.runtime.simulation.setting import make_setting

from .support.results import add_json_option, write_json

CHUNKS = (128, 256, 384, 512, 768, 1024, 1536, 2048, "auto")
POLICIES = ("sarathi", "equal_time")
LLAMA_70B = ("model=llama2-70b", "parallel=tp4_pp2")
SETTINGS: dict[str, tuple[str, ...]] = {
    "GPT-3, tp8 pp8, A100, P:D 10": (
        "model=gpt3-175b", "parallel=tp8_pp8", "workload=zipf", "workload.num_prompts=1000", "simulation.host=false"),
    "LLaMA 13B, pp2, A6000, P:D 10": (
        "model=llama-13b", "parallel=pp2", "hardware=a6000", "workload=zipf", "workload.min_len=500",
        "workload.max_len=2000", "workload.num_prompts=400"),
    "Llama 3 8B, H100, P:D 3": (
        "model=llama3-8b", "parallel=local", "hardware=h100", "workload=zipf", "workload.pd_ratio=3",
        "workload.num_prompts=800"),
    "Llama 2 70B, tp4 pp2, A100, 512 in, 512 out": (
        *LLAMA_70B, "workload=fixed", "workload.input_len=512", "workload.output_len=512", "workload.num_prompts=800"),
    "the same, P:D 5": (*LLAMA_70B, "workload=zipf", "workload.pd_ratio=5", "workload.num_prompts=800"),
    "the same, P:D 50": (*LLAMA_70B, "workload=zipf", "workload.pd_ratio=50", "workload.num_prompts=800"),
    "the same, P:D 5, 1.5 requests/s": (
        *LLAMA_70B, "workload=zipf", "workload.pd_ratio=5", "workload.num_prompts=600", "workload.request_rate=1.5"),
    "the same, P:D 5, 3 requests/s": (
        *LLAMA_70B, "workload=zipf", "workload.pd_ratio=5", "workload.num_prompts=600", "workload.request_rate=3"),
}  # fmt: skip


class Run(NamedTuple):
    """What one simulation came to; `first_picked`: the first chunks that `auto` picked, four at most."""

    chunk: int | str
    makespan_s: float
    p99_tbt_ms: float
    median_ttft_s: float
    first_picked: list[int]
    num_picked: int

    def __str__(self) -> str:
        return f"{self.makespan_s:7.1f} s {self.p99_tbt_ms:6.0f} ms {self.median_ttft_s:7.2f} s"


def run(overrides: tuple[str, ...], policy: str, chunk: int | str) -> Run:
    own = [f"scheduler={policy}", f"scheduler.chunk={chunk}"]
    if policy == "equal_time":
        own.append("scheduler.iterations=null")  # else the chunk grows
    config = compose_one([*overrides, *own], SimulateConfig, "simulate")
    workload, _ = requests(config)
    records = [replica.record for replica in simulated(make_setting(config), workload)]
    summary: dict[str, Any] = Fleet(records).summarize()
    picked = [int(note.split()[1]) for record in records for note in record.notes if note.startswith("chunk=auto: ")]
    ttft = summary["median_ttft_ms"] / 1e3
    return Run(chunk, summary["duration"], summary["p99_itl_ms"], ttft, picked[:4], len(picked))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", help="recorded requests, for Llama 2 70B")
    add_json_option(parser)
    arguments = parser.parse_args()
    trace = arguments.trace
    settings = dict(SETTINGS)
    if trace is not None:
        settings["the same, the trace"] = (*LLAMA_70B, "workload=trace", f"workload.path={trace}")
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        started = {
            (name, policy): [pool.submit(run, overrides, policy, chunk) for chunk in CHUNKS]
            for name, overrides in settings.items()
            for policy in POLICIES
        }
        rows = []
        print(f"{'':12}{'chunk':>14}  makespan   p99 TBT  p50 TTFT  auto's makespan by that one's")
        for (name, policy), futures in started.items():
            runs = {future.result().chunk: future.result() for future in futures}
            rows += [{"setting": name, "policy": policy, **run._asdict()} for run in runs.values()]
            auto = runs.pop("auto")
            fastest = min(runs.values(), key=lambda r: r.makespan_s)
            if policy == POLICIES[0]:
                print(name)
            print(f"  {policy:10}{256:>14} {runs[256]}{auto.makespan_s / runs[256].makespan_s:12.3f}")
            print(f"{'':12}{f'fastest, {fastest.chunk}':>14} {fastest}{auto.makespan_s / fastest.makespan_s:12.3f}")
            picked = ", ".join(map(str, auto.first_picked)) + (", ..." if auto.num_picked > 4 else "")
            print(f"{'':12}{'auto':>14} {auto}      {picked}", flush=True)
    write_json(arguments.json, "chunk", {"runs": rows})


if __name__ == "__main__":
    main()
