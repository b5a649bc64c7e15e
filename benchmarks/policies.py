"""Runs five policies by turns on the real pipeline, over ratios of prompt to output: `python -m benchmarks.policies`.

A LLaMA of about 160M parameters serves requests of 256 to 1,024 tokens over two pipeline stages of one thread each
(`support/real_pipeline.py`); all requests are there at the start. `orca_best`, `prefill_first`, `token_budget`,
`sarathi` and `equal_time` take turns, each with at most `--chunk` prompt tokens a micro-batch where the policy has such
a bound.

Prints medians for each ratio of prompt to output tokens (P:D); what is asked of the policies and whether they meet it,
turn by turn; and how much of each speed-up comes from less compute and how much from fewer bubbles.

Further arguments are overrides of `gapless bench`. About 40 minutes on 2 cores; --pd, --requests and --rounds shorten
it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .support.real_pipeline import compute_seconds, run, runs, summary
from .support.results import add_json_option, write_json

POLICIES = ("orca_best", "prefill_first", "token_budget", "sarathi", "equal_time")
ASKED: tuple[tuple[str, str, str, str, Callable[[float], bool], str], ...] = (
    ("throughput", "total_token_throughput", "sarathi", "orca_best", lambda r: r >= 1.25, "at least 1.25"),
    ("throughput", "total_token_throughput", "equal_time", "sarathi", lambda r: r >= 1.0, "at least 1"),
    ("p99 TBT", "p99_itl_ms", "equal_time", "sarathi", lambda r: r < 1.0, "under 1"),
)

Turn = dict[str, dict[str, Any]]  # the summary of each policy


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pd", default="2,5,10,20,50", help="ratios of prompt to output tokens")
    parser.add_argument("--chunk", default="128")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/policies"))
    parser.add_argument("--report", action="store_true", help="only report on the runs in --out")
    add_json_option(parser)
    arguments, overrides = parser.parse_known_args()
    ratios = [float(word) for word in arguments.pd.split(",")]
    if not arguments.report:
        keys = [f"scheduler.chunk={arguments.chunk}", f"scheduler.budget={arguments.chunk}", *overrides]
        for number in range(arguments.rounds):
            for ratio in ratios:
                run(_folder(arguments.out, ratio, number), POLICIES, ratio, arguments.requests, keys)
    report(arguments.out, ratios, arguments.rounds, arguments.json)
    return 0


def _folder(out: Path, ratio: float, number: int) -> Path:
    return out / f"pd{ratio:g}_round{number}"


def report(out: Path, ratios: list[float], rounds: int, json_file: Path | None) -> None:
    """Print what the runs in `out` came to; of a stopped benchmark, only the turns that all policies had."""
    figures: list[dict[str, Any]] = []
    asked: list[dict[str, Any]] = []
    causes: list[dict[str, Any]] = []
    print("\nmedians of the turns              tok/s  x orca_best  bubbles   p99 TBT   computed")
    for ratio in ratios:
        found = [runs(_folder(out, ratio, number), POLICIES) for number in range(rounds)]
        turns = [{name: summary(path) for name, path in paths.items()} for paths in found if paths]
        if not turns:
            continue
        figures += _figures(ratio, turns)
        asked += _asked(ratio, turns)
        causes += _causes(ratio, turns)
    print("\nasked, turn by turn: median [least .. most]")
    for row in asked:
        print(
            f"  P:D {row['pd_ratio']:<3g} {row['asked']:<54} {row['median_ratio']:6.3f} "
            f"[{row['least_ratio']:.3f} .. {row['most_ratio']:.3f}]  {'met' if row['met'] else 'NOT MET'}"
        )
    print("\nspeed-up = (compute time of the one / of the other) x (busy share of the other / of the one), medians")
    for row in causes:
        print(
            f"  P:D {row['pd_ratio']:<3g} {row['policy']:>10} over {row['over']:<10} "
            f"{row['compute_ratio']:.3f} x {row['busy_ratio']:.3f}"
        )
    write_json(json_file, "policies", {"policies": figures, "asked": asked, "speed_ups": causes})


def _figures(ratio: float, turns: list[Turn]) -> list[dict[str, Any]]:
    rows = []
    for name in POLICIES:
        of = [turn[name] for turn in turns]
        row = {
            "pd_ratio": ratio,
            "policy": name,
            "turns": len(turns),
            "tokens_per_s": statistics.median(one["total_token_throughput"] for one in of),
            "over_orca_best_ratio": statistics.median(_over(turns, "total_token_throughput", name, "orca_best")),
            "bubble_share": statistics.median(one["bubble_fraction"] for one in of),
            "p99_tbt_ms": statistics.median(one["p99_itl_ms"] for one in of),
            "compute_s": statistics.median(map(compute_seconds, of)),
        }
        print(
            f"  P:D {ratio:<3g} {name:<14} {row['tokens_per_s']:14.1f} {row['over_orca_best_ratio']:12.3f} "
            f"{row['bubble_share']:8.1%} {row['p99_tbt_ms']:6.0f} ms {row['compute_s']:8.1f} s"
        )
        rows.append(row)
    return rows


def _over(turns: list[Turn], metric: str, over: str, under: str) -> list[float]:
    """Return the metric of one over the other, turn by turn: both ran in the same minutes."""
    return [turn[over][metric] / max(turn[under][metric], 1e-12) for turn in turns]


def _asked(ratio: float, turns: list[Turn]) -> list[dict[str, Any]]:
    rows = []
    for what, metric, over, under, holds, bound in ASKED:
        values = _over(turns, metric, over, under)
        rows.append({
            "pd_ratio": ratio, "asked": f"{what} of {over} over {under}, {bound}",
            "median_ratio": statistics.median(values), "least_ratio": min(values), "most_ratio": max(values),
            "met": holds(statistics.median(values)),
        })  # fmt: skip
    return rows


def _causes(ratio: float, turns: list[Turn]) -> list[dict[str, Any]]:
    rows = []
    for over, under in (("sarathi", "orca_best"), ("equal_time", "sarathi")):
        compute = [compute_seconds(turn[under]) / compute_seconds(turn[over]) for turn in turns]
        busy = [(1 - turn[over]["bubble_fraction"]) / (1 - turn[under]["bubble_fraction"]) for turn in turns]
        rows.append({
            "pd_ratio": ratio, "policy": over, "over": under, "compute_ratio": statistics.median(compute),
            "busy_ratio": statistics.median(busy),
        })  # fmt: skip
    return rows


if __name__ == "__main__":
    sys.exit(main())
