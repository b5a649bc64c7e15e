"""The real pipeline that `benchmarks/policies.py` and `benchmarks/real_chunk.py` run on: two stages of one thread each.

A LLaMA of about 160M parameters with random weights serves requests of 256 to 1,024 tokens in all. Up to 8 requests
share a micro-batch, few enough that every slot is refilled several times in a run.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gapless.conf.errors import ConfigError
from gapless.launch.cli import main as gapless

SETTING = (
    "model=llama-160m",
    "hardware.memory_gib=6",
    "parallel=pp2",
    "parallel.threads=1",
    "scheduler.batch=8",
    "workload=zipf",
    "workload.theta=0",  # uniform
    "workload.min_len=256",
    "workload.max_len=1024",
)


def run(folder: Path, policies: Sequence[str], pd_ratio: float, num_prompts: int, overrides: Sequence[str]) -> None:
    """Run the policies one after the other on one started pipeline, into folders of `folder`.

    Raises:
        ConfigError: `gapless bench` failed, and has said why.
    """
    command = [
        "bench", *SETTING, f"scheduler={','.join(policies)}", f"workload.pd_ratio={pd_ratio:g}",
        f"workload.num_prompts={num_prompts}", f"hydra.run.dir={folder}", *overrides,
    ]  # fmt: skip
    if code := gapless(command):
        raise ConfigError(f"gapless {' '.join(command)} ended with {code}")


def runs(folder: Path, policies: Sequence[str]) -> dict[str, Path]:
    """Return the run folder of each policy in a folder that `run` filled; empty where one is missing."""
    found = {name: next(folder.glob(f"*_{name}/summary.json"), None) for name in policies}
    return {name: path.parent for name, path in found.items() if path is not None} if all(found.values()) else {}


def summary(run_folder: Path) -> dict[str, Any]:
    return json.loads((run_folder / "summary.json").read_text())  # type: ignore[no-any-return]


def compute_seconds(summary: dict[str, Any]) -> float:
    """Seconds that a stage computed, averaged over the stages."""
    return float(np.mean(summary["stage_busy_fraction"])) * float(summary["duration"])
