"""Sends one long prompt through two real pipeline stages: `python -m benchmarks.real_long_prompt`.

A tiny LLaMA with random weights computes a prompt of 131,072 tokens in chunks, over two stages of one thread each. The
last stage has two of the three layers: the last layer computes attention for sampled rows only, and so hardly any. The
chunks follow each other through the stages, or (`parallel.depth=1`) each waits until the one before has left the
pipeline. Prints the time to the first token, the bubbles, and how much sooner the token comes; by turns.

`benchmarks.long_prompts` simulates large models. Further arguments are overrides of `gapless bench`. About six minutes
on 2 cores; --tokens shortens it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from gapless.conf.errors import ConfigError
from gapless.launch.cli import main as gapless

from .support.real_pipeline import runs, summary
from .support.results import add_json_option, write_json

POLICIES = ("sarathi", "equal_time")
STAGES = 2


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--chunks", default="512,2048")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/real_long_prompt"))
    add_json_option(parser)
    arguments, overrides = parser.parse_known_args()
    found: dict[tuple[str, str, bool], list[dict[str, Any]]] = {}
    for number in range(arguments.rounds):
        for chunk in arguments.chunks.split(","):
            for alone in (True, False):
                folder = arguments.out / f"chunk{chunk}_{'one' if alone else 'all'}_round{number}"
                run(folder, arguments.tokens, chunk, [*(["parallel.depth=1"] if alone else []), *overrides])
                for policy, path in runs(folder, POLICIES).items():
                    found.setdefault((policy, chunk, alone), []).append(summary(path))
    rows = report(arguments.tokens, found)
    write_json(arguments.json, "real_long_prompt", {"prompts": rows})
    return 0


def run(folder: Path, tokens: int, chunk: str, overrides: list[str]) -> None:
    command = [
        "bench", "model=tiny", f"model.architecture.max_position={tokens + 16}", "model.architecture.num_layers=3",
        f"parallel.pp={STAGES}", "parallel.layers=[1,2]", "parallel.launcher=ray", "parallel.threads=1",
        f"scheduler={','.join(POLICIES)}", f"scheduler.chunk={chunk}", "workload.num_prompts=1",
        f"workload.input_len={tokens}", "workload.output_len=4", f"hydra.run.dir={folder}", *overrides,
    ]  # fmt: skip
    if code := gapless(command):
        raise ConfigError(f"gapless {' '.join(command)} ended with {code}")


def report(tokens: int, found: dict[tuple[str, str, bool], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Print the median of each case."""
    rows = []
    print(f"\n{tokens:,} tokens through {STAGES} stages    TTFT  one in flight  sooner  bubbles")
    for policy in POLICIES:
        for chunk in dict.fromkeys(chunk for _, chunk, _ in found):
            one, every = (
                statistics.median(each["median_ttft_ms"] for each in found[policy, chunk, alone]) / 1e3
                for alone in (True, False)
            )
            bubbles = statistics.median(each["bubble_fraction"] for each in found[policy, chunk, False])
            row = {
                "policy": policy, "chunk": chunk, "ttft_s": every, "one_in_flight_s": one, "sooner_ratio": one / every,
                "bubble_share": bubbles,
            }  # fmt: skip
            print(f"  {policy:<10} chunk={chunk:<5} {every:16.2f} s {one:11.2f} s {one / every:7.2f}x {bubbles:7.1%}")
            rows.append(row)
    return rows


if __name__ == "__main__":
    sys.exit(main())
