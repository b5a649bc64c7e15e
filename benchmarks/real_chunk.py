"""Runs chunk sizes by turns on the real pipeline, `chunk=auto` among them: `python -m benchmarks.real_chunk`.

The pipeline and its workloads are those of `benchmarks/policies.py` (`support/real_pipeline.py`). For each policy and
ratio of prompt to output tokens (P:D) it prints the tokens/s of each chunk size over those of the best fixed size, the
medians of the turns.

Further arguments are overrides of `gapless bench`. About 40 minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from .support.real_pipeline import run, runs, summary
from .support.results import add_json_option, write_json

POLICIES = ("sarathi", "equal_time")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chunks", default="64,128,256,512,auto")
    parser.add_argument("--pd", default="2,10,50", help="ratios of prompt to output tokens")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/real_chunk"))
    parser.add_argument("--report", action="store_true", help="only report on the runs in --out")
    add_json_option(parser)
    arguments, overrides = parser.parse_known_args()
    ratios, chunks = [float(word) for word in arguments.pd.split(",")], arguments.chunks.split(",")
    if not arguments.report:
        for number in range(arguments.rounds):
            for ratio in ratios:
                for chunk in chunks:
                    folder = _folder(arguments.out, ratio, chunk, number)
                    run(folder, POLICIES, ratio, arguments.requests, [f"scheduler.chunk={chunk}", *overrides])
    report(arguments.out, ratios, chunks, arguments.rounds, arguments.json)
    return 0


def _folder(out: Path, ratio: float, chunk: str, number: int) -> Path:
    return out / f"pd{ratio:g}_{chunk}_round{number}"


def report(out: Path, ratios: list[float], chunks: list[str], rounds: int, json_file: Path | None) -> None:
    """Print what the runs in `out` came to."""
    rows: list[dict[str, Any]] = []
    print("\nmedians of the turns            tok/s  x best fixed   p99 TBT  bubbles")
    for ratio in ratios:
        for policy in POLICIES:
            found: dict[str, list[dict[str, Any]]] = {}
            for chunk in chunks:
                turns = [runs(_folder(out, ratio, chunk, number), POLICIES) for number in range(rounds)]
                found[chunk] = [summary(turn[policy]) for turn in turns if turn]
            rows += _compare(ratio, policy, {chunk: of for chunk, of in found.items() if of})
    write_json(json_file, "real_chunk", {"chunks": rows})


def _compare(ratio: float, policy: str, found: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    def speed(chunk: str) -> float:
        return statistics.median(one["total_token_throughput"] for one in found[chunk])

    best = max((chunk for chunk in found if chunk != "auto"), key=speed, default=None)
    rows = []
    for chunk, of in found.items():
        row = {
            "pd_ratio": ratio, "policy": policy, "chunk": int(chunk) if chunk.isdigit() else chunk, "turns": len(of),
            "tokens_per_s": speed(chunk),
            "over_best_ratio": speed(chunk) / speed(best) if best else None,
            "p99_tbt_ms": statistics.median(one["p99_itl_ms"] for one in of),
            "bubble_share": statistics.median(one["bubble_fraction"] for one in of),
        }  # fmt: skip
        over = f"{row['over_best_ratio']:.3f}" if best else "-"
        print(
            f"  P:D {ratio:<3g} {policy:<10} {chunk:>5} {row['tokens_per_s']:10.1f} {over:>10} "
            f"{row['p99_tbt_ms']:9.0f} ms {row['bubble_share']:7.1%}"
        )
        rows.append(row)
    return rows


if __name__ == "__main__":
    sys.exit(main())
