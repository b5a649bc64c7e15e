"""Simulates one long prompt through a pipeline, alone and among other requests: `python -m benchmarks.long_prompts`.

Sends 131,072 tokens through Llama 2 70B and GPT-3 over 8 x 8 A100s, with each fixed chunk of `sarathi` and with
`equal_time`, and prints the speed-up over one chunk in flight (for `chunk=auto`: over the best of those). Then 120
short requests arrive at half of the pipeline's capacity, with the long prompt among them. The table shows the long
prompt's TTFT, the short requests' TTFT, and their TBT while the long prompt is prefilled. About 15 seconds.

`--real` sends the long prompt (`--tokens`) through two real pipeline stages of one thread each: a tiny LLaMA with
random weights prefills it in `--chunks`. The last stage has two of the three layers, because the last layer computes
attention only for sampled rows and has little work. Chunks are pipelined, or (`parallel.depth=1`) each waits until the
previous one has left the pipeline; the runs are interleaved. Overrides of `gapless bench` follow the options. About six
minutes on 2 cores.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from gapless.runtime.core.request_record import RequestRecord
from gapless.runtime.simulation.workload import Workload

from .support.harness import Benchmark, Row
from .support.real_pipeline import bench_by_turns
from .support.simulated import configure, replicas_of

LONG = 131_072  # tokens
CLUSTER = f"hardware=a100-80g parallel=tp8_pp8 model.architecture.max_position={LONG + 4096}"
MODELS = ("llama2-70b", "gpt3-175b")
CHUNKS = (256, 512, 1024, 2048, 4096, 8192)
SHORT = 1024, 128  # prompt and output tokens
LONG_AFTER = 30  # short requests that arrive before the long one
NUM_SHORT = 120
BESIDE = {
    "sarathi": "scheduler=sarathi",
    "sarathi 1024": "scheduler=sarathi scheduler.chunk=1024",
    "sarathi, relative_slack": "scheduler=sarathi scheduler.order=relative_slack",
    "equal_time": "scheduler=equal_time",
    "equal_time, iterations=null": "scheduler=equal_time scheduler.iterations=null",
    "equal_time, relative_slack": "scheduler=equal_time scheduler.order=relative_slack",
    "equal_time, 10 ms": "scheduler=equal_time scheduler.target_ms=10",
    "equal_time, 10 ms, relative_slack": "scheduler=equal_time scheduler.target_ms=10 scheduler.order=relative_slack",
}


def main() -> int:
    out = Path("runs/long_prompts")
    bench = Benchmark(__doc__, real=False, tokens=LONG, chunks=["512", "2048"], rounds=1, out=out, overrides=True)
    if bench.given.real:
        through_real_stages(bench)
        return bench.end()
    for name, simulate in (("alone", alone), ("beside", beside)):
        for model in MODELS:
            for row in simulate(model):
                bench.row(name, **row)
    return bench.end()


def alone(model: str) -> list[Row]:
    """Simulate one long prompt alone, with each fixed chunk at depth 1 and at full depth, and with `chunk=auto`."""
    lone = workload([LONG], [1], [0.0])

    def ttft(*overrides: str) -> float:
        return run(model, lone, *overrides)[0].token_times[0]

    rows = []
    for chunk in CHUNKS:
        for policy in ("sarathi", "equal_time"):
            keys = f"scheduler={policy} scheduler.chunk={chunk}"
            rows.append((f"{policy} chunk={chunk}", ttft(keys), ttft(keys, "parallel.depth=1")))
    best = min(one for _, _, one in rows)
    rows.append(("equal_time chunk=auto", ttft("scheduler=equal_time scheduler.chunk=auto"), best))
    return [
        {"model": model, "policy": policy, "ttft_s": every, "one_in_flight_s": one, "faster": one / every}
        for policy, every, one in rows
    ]


def beside(model: str) -> list[Row]:
    """Simulate a long prompt among short requests with Poisson arrivals at half of the pipeline's capacity."""
    prompts, outputs = [SHORT[0]] * NUM_SHORT, [SHORT[1]] * NUM_SHORT
    busy = run(model, workload(prompts, outputs, [0.0] * NUM_SHORT), "scheduler=sarathi")
    rate = 0.5 * NUM_SHORT / max(r.token_times[-1] for r in busy)
    arrivals = np.cumsum(np.random.default_rng(0).exponential(1 / rate, NUM_SHORT)).tolist()
    prompts[LONG_AFTER], outputs[LONG_AFTER] = LONG, 1
    return [
        {"model": model, "policy": name, **latencies(run(model, workload(prompts, outputs, arrivals), overrides))}
        for name, overrides in BESIDE.items()
    ]


def latencies(records: Sequence[RequestRecord]) -> dict[str, float]:
    """Return the long prompt's TTFT, and the short requests' TTFT and TBT while it was prefilled."""
    long, short = records[LONG_AFTER], [r for i, r in enumerate(records) if i != LONG_AFTER]
    start, end = long.arrival, long.token_times[0]
    gaps = [b - a for r in short for a, b in zip(r.token_times, r.token_times[1:], strict=False) if start <= b <= end]
    ttft = [r.token_times[0] - r.arrival for r in short if start <= r.arrival <= end]
    return {
        "long_ttft_s": end - start,
        "p50_ttft_s": statistics.median(ttft),
        "p99_ttft_s": float(np.quantile(ttft, 0.99)),
        "p50_tbt_ms": 1e3 * statistics.median(gaps),
        "p99_tbt_ms": 1e3 * float(np.quantile(gaps, 0.99)),
        "max_tbt_ms": 1e3 * max(gaps),
    }


def workload(prompts: Sequence[int], outputs: Sequence[int], arrivals: Sequence[float]) -> Workload:
    return Workload(np.array(prompts), np.array(outputs), np.array(arrivals), vocab_size=32_000)


def run(model: str, items: Workload, *overrides: str) -> list[RequestRecord]:
    """Simulate the requests and return their records in order."""
    (replica,) = replicas_of(configure(f"model={model}", CLUSTER, *overrides), items)
    return sorted(replica.record.requests, key=lambda record: record.request)


def through_real_stages(bench: Benchmark) -> None:
    """Send a long prompt through two real stages, with pipelined chunks and with one chunk at a time."""
    given, policies = bench.given, ("sarathi", "equal_time")
    setting = (
        f"model=tiny model.architecture.max_position={given.tokens + 16} model.architecture.num_layers=3 parallel.pp=2 "
        "parallel.layers=[1,2] parallel.launcher=ray parallel.threads=1 workload.num_prompts=1 "
        f"workload.input_len={given.tokens} workload.output_len=4"
    )
    depths = {"one": " parallel.depth=1", "all": ""}
    cases = {
        f"chunk{chunk}_{name}": f"{setting} scheduler.chunk={chunk}{depth}"
        for chunk in given.chunks
        for name, depth in depths.items()
    }
    found = bench_by_turns(given.out, given.rounds, policies, cases, given.overrides)
    for policy in policies:
        for chunk in given.chunks:
            one, every = ([turn[policy] for turn in found[f"chunk{chunk}_{name}"]] for name in depths)
            waits, ttft = (statistics.median(each["median_ttft_ms"] for each in of) / 1e3 for of in (one, every))
            bubbles = statistics.median(each["bubble_fraction"] for each in every)
            shown = {"ttft_s": ttft, "one_in_flight_s": waits, "sooner_ratio": waits / ttft, "bubble_share": bubbles}
            bench.row("prompts", policy=policy, chunk=chunk, **shown)


if __name__ == "__main__":
    sys.exit(main())
