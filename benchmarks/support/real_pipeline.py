"""Interleaved runs of `gapless bench` on the real pipeline.

In `SETTING` a LLaMA of about 160M parameters with random weights serves requests of 256 to 1,024 tokens (prompt and
output) over two stages of one thread each. A micro-batch has at most 8 requests, so every slot is refilled several
times during a run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .harness import run_gapless, words

MACHINE = "model=llama-160m parallel=pp2 parallel.threads=1"
SETTING = (
    f"{MACHINE} hardware.memory_gib=6 scheduler.batch=8 workload=zipf workload.theta=0 workload.min_len=256 "
    "workload.max_len=1024"
)
Turn = dict[str, dict[str, Any]]  # summary.json by policy


def bench_by_turns(
    out: Path,
    rounds: int,
    policies: Sequence[str],
    cases: Mapping[str, str],
    overrides: Sequence[str],
    run: bool = True,
) -> dict[str, list[Turn]]:
    """Run all policies on one pipeline per case and round.

    Args:
        out: parent of the run folders.
        rounds: runs of each case.
        policies: their names.
        cases: overrides by name.
        overrides: for all cases.
        run: False: only read existing runs.

    Returns:
        The complete rounds, by case.
    """
    for number in range(rounds) if run else ():
        for name, keys in cases.items():
            folder = f"hydra.run.dir={out / name}_round{number}"
            run_gapless("bench", *words(keys, f"scheduler={','.join(policies)}", *overrides, folder))
    turns = {name: [_summaries(Path(f"{out / name}_round{n}"), policies) for n in range(rounds)] for name in cases}
    return {name: [turn for turn in of if len(turn) == len(policies)] for name, of in turns.items()}


def _summaries(folder: Path, policies: Sequence[str]) -> Turn:
    found = {name: next(folder.glob(f"*_{name}"), folder) for name in policies}
    return {name: summary(path) for name, path in found.items() if (path / "summary.json").is_file()}


def summary(run_folder: Path) -> dict[str, Any]:
    return json.loads((run_folder / "summary.json").read_text())  # type: ignore[no-any-return]
