"""Compares policies and chunk sizes on the real pipeline in interleaved runs, at several P:D ratios.

    python -m benchmarks.policies                                                        # five policies
    python -m benchmarks.policies --policies sarathi,equal_time --chunks 64,128,256,512,auto --pd 2,10,50

A LLaMA of about 160M parameters serves requests of 256 to 1,024 tokens over two pipeline stages of one thread each
(`support/real_pipeline.py`); all requests arrive at the start. Runs of the policies are interleaved. `--chunks` bounds
the prompt tokens of a micro-batch for policies that have such a bound.

Prints, for each ratio of prompt to output tokens (P:D), medians and the throughput relative to the first policy (per
turn) and to the best fixed chunk; whether each requirement is met; and how much of each speed-up comes from less
compute and how much from fewer bubbles.

Further arguments are overrides of `gapless bench`. About 40 minutes on 2 cores; --pd, --requests and --rounds shorten
it. `--report` only reports on the runs in --out.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .support.harness import Benchmark, figures, medians
from .support.real_pipeline import SETTING, Turn, bench_by_turns

SPEED = "total_token_throughput"
ASKED: tuple[tuple[str, str, str, str, Callable[[float], bool], str], ...] = (
    ("throughput", SPEED, "sarathi", "orca_best", lambda r: r >= 1.25, "at least 1.25"),
    ("throughput", SPEED, "equal_time", "sarathi", lambda r: r >= 1.0, "at least 1"),
    ("p99 TBT", "p99_itl_ms", "equal_time", "sarathi", lambda r: r < 1.0, "under 1"),
)


def main() -> int:
    bench = Benchmark(
        __doc__,
        overrides=True,
        policies=["orca_best", "prefill_first", "token_budget", "sarathi", "equal_time"],
        chunks=["128"],
        pd=[2.0, 5.0, 10.0, 20.0, 50.0],
        requests=24,
        rounds=3,
        out=Path("runs/policies"),
        report=False,
    )
    given = bench.given
    cases = {
        f"pd{ratio:g}_{chunk}": f"{SETTING} workload.pd_ratio={ratio:g} workload.num_prompts={given.requests} "
        f"scheduler.chunk={chunk}"
        + (f" scheduler.max_batched_tokens={chunk}" if "token_budget" in given.policies else "")
        for ratio in given.pd
        for chunk in given.chunks
    }
    found = bench_by_turns(given.out, given.rounds, given.policies, cases, given.overrides, run=not given.report)
    for ratio in given.pd:
        by_chunk = {chunk: turns for chunk in given.chunks if (turns := found[f"pd{ratio:g}_{chunk}"])}
        for policy in given.policies:
            speeds = {c: statistics.median(turn[policy][SPEED] for turn in turns) for c, turns in by_chunk.items()}
            best = max((speed for chunk, speed in speeds.items() if chunk != "auto"), default=None)
            for chunk, turns in by_chunk.items():
                shown = medians([_figures(turn[policy]) for turn in turns])
                over = {f"over_{given.policies[0]}_ratio": _over(turns, SPEED, policy, given.policies[0])}
                if len(given.chunks) > 1:
                    over["over_best_ratio"] = [speeds[chunk] / best] if best else [float("nan")]
                ratios = {name: statistics.median(values) for name, values in over.items()}
                bench.row("policies", pd_ratio=ratio, policy=policy, chunk=chunk, turns=len(turns), **shown, **ratios)
        if len(by_chunk) == 1:
            _explain(bench, ratio, *by_chunk.values())
    return bench.end()


def _figures(summary: dict[str, Any]) -> dict[str, float]:
    found = figures(summary, "tokens_per_s", "bubble_share", "p99_tbt_ms")
    return found | {"compute_s": _compute_seconds(summary)}


def _explain(bench: Benchmark, ratio: float, turns: list[Turn]) -> None:
    """Report whether requirements are met, and where speed-ups come from."""
    pairs = {}
    for what, metric, over, under, holds, bound in ASKED:
        if {over, under} <= turns[0].keys():
            values, asked = _over(turns, metric, over, under), f"{what} of {over} over {under}, {bound}"
            middle = statistics.median(values)
            found = {"median_ratio": middle, "least_ratio": min(values), "most_ratio": max(values)}
            bench.row("asked", pd_ratio=ratio, asked=asked, **found, met=holds(middle))
            pairs[over, under] = None
    for over, under in pairs:
        compute = [_compute_seconds(turn[under]) / _compute_seconds(turn[over]) for turn in turns]
        busy = [(1 - turn[over]["bubble_fraction"]) / (1 - turn[under]["bubble_fraction"]) for turn in turns]
        found = {"compute_ratio": statistics.median(compute), "busy_ratio": statistics.median(busy)}
        bench.row("speed_ups", pd_ratio=ratio, policy=over, over=under, **found)


def _over(turns: list[Turn], metric: str, over: str, under: str) -> list[float]:
    """Return the ratio of a metric of two policies for each turn; both ran within the same minutes."""
    return [turn[over][metric] / max(turn[under][metric], 1e-12) for turn in turns]


def _compute_seconds(summary: dict[str, Any]) -> float:
    """Return the compute time of a stage, averaged over stages."""
    return statistics.fmean(summary["stage_busy_fraction"]) * float(summary["duration"])


if __name__ == "__main__":
    sys.exit(main())
