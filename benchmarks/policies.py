"""Runs three policies side by side on the real pipeline: `python -m benchmarks.policies`.

A LLaMA of about 160M parameters with random weights serves requests of 512 to 2048 tokens, P:D 10, over two pipeline
stages of one thread each. All requests are there at the start; `orca_best`, `sarathi` and `equal_time` take turns.
Prints `gapless bench`'s table, then whether the policies meet their requirements; how much of each speed-up comes from
less compute and how much from fewer bubbles; and how much slower a stage computes while the other does. Where cores
share caches or memory bandwidth, removed bubbles can come back as slower compute.

Further arguments are overrides of `gapless bench`. About 50 minutes on 2 cores; --requests and --repeats shorten it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gapless.launch.cli import main as gapless
from gapless.runtime.core.features import features
from gapless.runtime.core.run_record import RunRecord
from gapless.runtime.ledger.ledger import Ledger
from gapless.runtime.run_folder.read import read_run_folder

from .support.results import add_json_option, write_json

POLICIES = ("orca_best", "sarathi", "equal_time")
SETTING = (
    "model=llama-160m",
    "hardware.memory_gib=6",
    "parallel=pp2",
    "parallel.threads=1",
    f"scheduler={','.join(POLICIES)}",
    "scheduler.batch=8",  # few enough that every slot is refilled several times in a run
    "scheduler.chunk=96",  # a little over (B-1) x P:D = 70, as smaller chunks waste compute
    "workload=zipf",
    "workload.theta=0",  # uniform
    "workload.min_len=512",
    "workload.max_len=2048",
    "workload.pd_ratio=10",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=36)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("runs/policies"))
    parser.add_argument("--report", action="store_true", help="only report on the runs in --out")
    add_json_option(parser)
    arguments, overrides = parser.parse_known_args()
    if arguments.report:
        report(arguments.out, arguments.json)
        return 0
    command = [
        "bench", *SETTING, f"workload.num_prompts={arguments.requests}", f"repeats={arguments.repeats}",
        f"hydra.run.dir={arguments.out}", *overrides,
    ]  # fmt: skip
    if code := gapless(command):
        return code
    report(arguments.out, arguments.json)
    return 0


def report(folder: Path, json_file: Path | None) -> None:
    """Print what the runs in `folder` came to; of a stopped benchmark, only the turns that all policies had."""
    paths = sorted(path.parent for path in folder.glob("*/summary.json"))
    of = {name: [path for path in paths if path.name.endswith(f"_{name}")] for name in POLICIES}
    turns = min(map(len, of.values()))
    summaries = {name: [json.loads((p / "summary.json").read_text()) for p in of[name][:turns]] for name in POLICIES}
    policies: list[dict[str, Any]] = []
    requirements: list[dict[str, Any]] = []
    speed_ups: list[dict[str, Any]] = []
    print(f"\n{turns} turns of {', '.join(POLICIES)}; medians")
    for name, runs in summaries.items():
        tokens, bubbles, tail = (
            statistics.median(run[key] for run in runs)
            for key in ("total_token_throughput", "bubble_fraction", "p99_itl_ms")
        )
        print(f"  {name:<12} {tokens:7.1f} tok/s   bubbles {bubbles:6.1%}   p99 TBT {tail / 1e3:6.2f} s")
        figures = {"tokens_per_s": tokens, "bubble_share": bubbles, "p99_tbt_s": tail / 1e3}
        policies.append({"policy": name, **figures})

    def ratios(metric: str, over: str, under: str) -> list[float]:
        """The metric of one over the other, turn by turn: both ran one after the other."""
        return [a[metric] / max(b[metric], 1e-12) for a, b in zip(summaries[over], summaries[under], strict=True)]

    print("\nrequired, turn by turn: median [least .. most]")
    for text, values, holds in (
        ("throughput of sarathi over orca_best, at least 1.25",
         ratios("total_token_throughput", "sarathi", "orca_best"), lambda r: r >= 1.25),
        ("bubble fraction of sarathi over orca_best, at most 0.5",
         ratios("bubble_fraction", "sarathi", "orca_best"), lambda r: r <= 0.5),
        ("throughput of equal_time over sarathi, at least 1",
         ratios("total_token_throughput", "equal_time", "sarathi"), lambda r: r >= 1.0),
        ("bubble fraction of equal_time over sarathi, under 1",
         ratios("bubble_fraction", "equal_time", "sarathi"), lambda r: r < 1.0),
        ("p99 TBT of equal_time over sarathi, under 1",
         ratios("p99_itl_ms", "equal_time", "sarathi"), lambda r: r < 1.0),
    ):  # fmt: skip
        median = statistics.median(values)
        met = "met" if holds(median) else "NOT MET"
        print(f"  {text:<56} {median:6.3f} [{min(values):.3f} .. {max(values):.3f}]  {met}")
        requirements.append({
            "requirement": text, "median_ratio": median, "least_ratio": min(values), "most_ratio": max(values),
            "met": holds(median),
        })  # fmt: skip

    print("\nspeed-up = (compute time of the one / of the other) x (busy share of the other / of the one), medians")
    for over, under in (("sarathi", "orca_best"), ("equal_time", "sarathi")):
        compute = [_compute(b) / _compute(a) for a, b in zip(summaries[over], summaries[under], strict=True)]
        busy = [
            (1 - a["bubble_fraction"]) / (1 - b["bubble_fraction"])
            for a, b in zip(summaries[over], summaries[under], strict=True)
        ]
        most = statistics.median(1 / (1 - run["bubble_fraction"]) for run in summaries[under])
        from_compute, from_busy = statistics.median(compute), statistics.median(busy)
        print(
            f"  {over} over {under}: {from_compute:.3f} x {from_busy:.3f}; "
            f"without any bubble and as much compute it would be {most:.3f}"
        )
        speed_ups.append({
            "policy": over, "over": under, "compute_ratio": from_compute, "busy_ratio": from_busy,
            "without_bubbles_ratio": most,
        })  # fmt: skip

    print("\na stage's time for a micro-batch while the other stage computes, over its time while the other is idle")
    for name, row in zip(POLICIES, policies, strict=True):
        found = [slowdown(read_run_folder(path).load()) for path in of[name][:turns]]
        work = statistics.median(_compute(summary) for summary in summaries[name])
        print(
            f"  {name:<12} {statistics.median(found):.2f} [{min(found):.2f} .. {max(found):.2f}]   "
            f"a stage computed for {work:.1f} s"
        )
        row |= {
            "median_slowdown": statistics.median(found), "least_slowdown": min(found), "most_slowdown": max(found),
            "compute_s": work,
        }  # fmt: skip
    print("  (1.00: stages do not disturb each other; above it, a stage computes faster in the other's bubbles)")
    tables = {"policies": policies, "requirements": requirements, "speed_ups": speed_ups}
    write_json(json_file, "policies", tables)


def _compute(summary: dict[str, Any]) -> float:
    """Seconds that a stage computed, averaged over the stages."""
    return float(np.mean(summary["stage_busy_fraction"])) * float(summary["duration"])


def slowdown(record: RunRecord) -> float:
    """How many times longer a stage takes for a micro-batch while the other stages compute.

    Fits stage times by w . features x (1 + b x overlap) with b >= 0, least squares of relative errors, and returns
    1 + b. Overlap is the share of a micro-batch's time in which another stage computed too, averaged over the others.
    """
    micro_batches = {micro_batch.micro_batch: np.array(features(micro_batch)) for micro_batch in record.micro_batches}
    lanes = Ledger(record).lanes
    busy = [_cumulative(lane.begin, lane.end) for lane in lanes]
    best: dict[float, float] = dict.fromkeys(np.linspace(0.0, 2.0, 101).tolist(), 0.0)
    for stage, lane in enumerate(lanes):
        x = np.array([micro_batches[micro_batch] for micro_batch in lane.micro_batch.tolist()])
        y = lane.end - lane.begin
        others = [np.interp(lane.end, *b) - np.interp(lane.begin, *b) for s, b in enumerate(busy) if s != stage]
        overlap = np.mean(others, axis=0) / y
        for factor in best:
            scaled = x * (1 + factor * overlap)[:, None] / y[:, None]
            scaled /= np.abs(scaled).max(axis=0).clip(min=1e-12)
            weights, *_ = np.linalg.lstsq(scaled, np.ones(len(y)), rcond=None)
            best[factor] += float(np.abs(scaled @ weights - 1).sum())
    return 1 + min(best, key=best.__getitem__)


def _cumulative(
    begin: npt.NDArray[np.float64], end: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Begin and end times in order, and the seconds of compute up to each."""
    times = np.stack([begin, end], axis=1).reshape(-1)
    return times, np.cumsum(np.stack([np.zeros(len(begin)), end - begin], axis=1).reshape(-1))


if __name__ == "__main__":
    sys.exit(main())
