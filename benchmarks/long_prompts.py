"""Simulates one long prompt through a pipeline, alone and beside other requests: `python -m benchmarks.long_prompts`.

It sends 131,072 tokens through Llama 2 70B and GPT-3 over 8 x 8 A100s, with each fixed chunk of
`sarathi` and with `equal_time`, and says how many times faster each is than with one chunk in flight. Then 120 short
requests arrive at a rate that keeps the pipeline half busy, and the long prompt among them: the table has its TTFT, the
short requests' TTFT, and their TBT while it is computed. It takes
about 15 seconds.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from gapless.conf.schema import SimulateConfig
from gapless.launch.compose import compose_one
from gapless.runtime.core.request_record import RequestRecord
from gapless.runtime.simulation.run import simulated
from gapless.runtime.simulation.setting import make_setting
from gapless.runtime.workload import Workload

from .support.results import add_json_option, write_json

LONG = 131_072  # tokens
CLUSTER = ("hardware=a100-80g", "parallel=tp8_pp8", f"model.architecture.max_position={LONG + 4096}")
MODELS = ("llama2-70b", "gpt3-175b")
CHUNKS = (256, 512, 1024, 2048, 4096, 8192)
SHORT = 1024, 128  # prompt and output tokens
LONG_AFTER = 30  # short requests that arrive before the long one
NUM_SHORT = 120


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_json_option(parser)
    arguments = parser.parse_args()
    tables: dict[str, list[dict[str, Any]]] = {"alone": [], "beside": []}
    for model in MODELS:
        tables["alone"] += alone(model)
    for model in MODELS:
        tables["beside"] += beside(model)
    write_json(arguments.json, "long_prompts", tables)


def alone(model: str) -> list[dict[str, Any]]:
    """Simulate one long prompt alone, with each fixed chunk at depth 1 and at full depth, and with `equal_time`."""
    print(f"\n{LONG:,} tokens alone: {model}, 8 x 8 A100s")
    print(f"{'':34}{'TTFT':>9}{'one in flight':>15}{'faster':>8}", flush=True)
    rows: list[dict[str, Any]] = []
    lone = workload([LONG], [1], [0.0])
    for chunk in CHUNKS:
        for policy in ("sarathi", "equal_time"):
            found = [
                run(model, lone, f"scheduler={policy}", f"scheduler.chunk={chunk}", *depth)[0].token_times[0]
                for depth in ((), ("parallel.depth=1",))
            ]
            rows.append(row(model, f"{policy} chunk={chunk}", *found))
    best = min(rows, key=lambda each: each["one_in_flight_s"])["one_in_flight_s"]
    ttft = run(model, lone, "scheduler=equal_time", "scheduler.chunk=auto")[0].token_times[0]
    rows.append(row(model, "equal_time chunk=auto", ttft, best))
    fixed = min((each for each in rows if each["policy"].startswith("sarathi")), key=lambda each: each["ttft_s"])
    print(f"  best fixed chunk: {fixed['policy']}; chunk=auto takes {ttft / fixed['ttft_s']:.2f} times as long")
    return rows


def row(model: str, policy: str, ttft: float, one: float) -> dict[str, Any]:
    print(f"  {policy:32}{ttft:7.2f} s{one:13.2f} s{one / ttft:7.2f}x", flush=True)
    return {"model": model, "policy": policy, "ttft_s": ttft, "one_in_flight_s": one, "faster": one / ttft}


BESIDE = (
    ("sarathi", "scheduler=sarathi"),
    ("sarathi 1024", "scheduler=sarathi", "scheduler.chunk=1024"),
    ("sarathi, relative_slack", "scheduler=sarathi", "scheduler.order=relative_slack"),
    ("equal_time", "scheduler=equal_time"),
    ("equal_time, iterations=null", "scheduler=equal_time", "scheduler.iterations=null"),
    ("equal_time, relative_slack", "scheduler=equal_time", "scheduler.order=relative_slack"),
    ("equal_time, 10 ms", "scheduler=equal_time", "scheduler.target_ms=10"),
    (
        "equal_time, 10 ms, relative_slack",
        "scheduler=equal_time",
        "scheduler.target_ms=10",
        "scheduler.order=relative_slack",
    ),
)


def beside(model: str) -> list[dict[str, Any]]:
    """Simulate a long prompt among short requests that arrive at random times, at half of what the pipeline serves."""
    prompts, outputs = [SHORT[0]] * NUM_SHORT, [SHORT[1]] * NUM_SHORT
    busy = run(model, workload(prompts, outputs, [0.0] * NUM_SHORT), "scheduler=sarathi")
    rate = 0.5 * NUM_SHORT / max(r.token_times[-1] for r in busy)
    arrivals = np.cumsum(np.random.default_rng(0).exponential(1 / rate, NUM_SHORT)).tolist()
    prompts[LONG_AFTER], outputs[LONG_AFTER] = LONG, 1
    print(
        f"\n{LONG:,} tokens beside {NUM_SHORT} requests of {SHORT[0]} + {SHORT[1]} tokens, {rate:.2f}/s: {model}\n"
        f"{'':36}{'long TTFT':>10}{'short TTFT p50':>16}{'p99':>9}{'TBT p50':>10}{'p99':>9}{'max':>9}"
    )
    rows = []
    for name, *overrides in BESIDE:
        records = run(model, workload(prompts, outputs, arrivals), *overrides)
        rows.append({"model": model, "policy": name, **beside_row(records)})
        r = rows[-1]
        print(
            f"  {name:34}{r['long_ttft_s']:8.1f} s{r['p50_ttft_s']:14.2f} s{r['p99_ttft_s']:7.2f} s"
            f"{r['p50_tbt_ms']:7.0f} ms{r['p99_tbt_ms']:6.0f} ms{r['max_tbt_ms']:6.0f} ms",
            flush=True,
        )
    return rows


def beside_row(records: Sequence[RequestRecord]) -> dict[str, float]:
    """The long prompt's TTFT, and TTFT and TBT of the short requests' tokens that came while it was computed."""
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
    """Simulate the requests, and return their records by number."""
    config = compose_one((f"model={model}", *CLUSTER, *overrides), SimulateConfig, "simulate")
    (replica,) = simulated(make_setting(config), items)
    return sorted(replica.record.requests, key=lambda record: record.request)


if __name__ == "__main__":
    main()
