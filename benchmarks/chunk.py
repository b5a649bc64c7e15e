"""Compares `scheduler.chunk=auto` with the best fixed chunk: `python -m benchmarks.chunk [--trace FILE]`.

Simulates each setting under `sarathi` and `equal_time` with chunks of 128 to 2,048 tokens and with `auto`, and prints
makespan, p99 TBT and median TTFT of the default chunk, of the fastest one and of `auto`. At a rate that the cluster
can serve, the arrivals decide the makespan, and the chunk decides TTFT and TBT. `--trace` adds a trace that
`workload=trace` reads as one more setting. All times are simulated, so they do not depend on the machine.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from gapless.runtime.ledger.summary import summarize

from .support.harness import Benchmark, Row, figures
from .support.simulated import configure, fleet_of

CHUNKS = (128, 256, 384, 512, 768, 1024, 1536, 2048, "auto")
POLICIES = ("sarathi", "equal_time")
LLAMA_70B = "model=llama2-70b parallel=tp4_pp2"
SETTINGS = {
    "GPT-3, tp8 pp8, A100, P:D 10": "model=gpt3-175b parallel=tp8_pp8 workload=zipf workload.num_prompts=1000 "
    "simulation.host=false",
    "LLaMA 13B, pp2, A6000, P:D 10": "model=llama-13b parallel=pp2 hardware=a6000 workload=zipf workload.min_len=500 "
    "workload.max_len=2000 workload.num_prompts=400",
    "Llama 3 8B, H100, P:D 3": "model=llama3-8b parallel=local hardware=h100 workload=zipf workload.pd_ratio=3 "
    "workload.num_prompts=800",
    "Llama 2 70B, tp4 pp2, A100, 512 in, 512 out": f"{LLAMA_70B} workload=fixed workload.input_len=512 "
    "workload.output_len=512 workload.num_prompts=800",
    "the same, P:D 5": f"{LLAMA_70B} workload=zipf workload.pd_ratio=5 workload.num_prompts=800",
    "the same, P:D 50": f"{LLAMA_70B} workload=zipf workload.pd_ratio=50 workload.num_prompts=800",
    "the same, P:D 5, 1.5 requests/s": f"{LLAMA_70B} workload=zipf workload.pd_ratio=5 workload.num_prompts=600 "
    "workload.request_rate=1.5",
    "the same, P:D 5, 3 requests/s": f"{LLAMA_70B} workload=zipf workload.pd_ratio=5 workload.num_prompts=600 "
    "workload.request_rate=3",
}


def run(overrides: str, policy: str, chunk: int | str) -> Row:
    """Simulate; `first_picked` are the first chunks that `auto` picked, four at most."""
    fixed = "scheduler.iterations=null" if policy == "equal_time" else ""  # else the chunk grows
    fleet = fleet_of(configure(overrides, f"scheduler={policy} scheduler.chunk={chunk} {fixed}".strip()))
    notes = [note for record in fleet.records for note in record.notes]
    picked = [int(note.split()[1]) for note in notes if note.startswith("chunk=auto: ")]
    found = figures(summarize(fleet), "makespan_s", "p99_tbt_ms", "median_ttft_s")
    return {"chunk": chunk, **found, "first_picked": picked[:4], "num_picked": len(picked)}


def main() -> int:
    bench = Benchmark(__doc__, trace={"type": Path, "help": "recorded requests, for Llama 2 70B"})
    settings = dict(SETTINGS)
    if bench.given.trace is not None:
        settings["the same, the trace"] = f"{LLAMA_70B} workload=trace workload.path={bench.given.trace}"
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        started = {
            (name, policy): [pool.submit(run, overrides, policy, chunk) for chunk in CHUNKS]
            for name, overrides in settings.items()
            for policy in POLICIES
        }
        for (name, policy), futures in started.items():
            runs = [bench.row("runs", setting=name, policy=policy, **future.result()) for future in futures]
            *fixed, auto = runs
            for one in (fixed[CHUNKS.index(256)], min(fixed, key=lambda one: one["makespan_s"]), auto):
                over = auto["makespan_s"] / one["makespan_s"]
                bench.row("default, fastest and auto", **one, auto_over_this=over)
    return bench.end(hidden=["runs"])


if __name__ == "__main__":
    sys.exit(main())
