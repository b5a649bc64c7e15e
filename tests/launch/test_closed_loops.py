"""Closed loops that warm up, think, repeat prompts and end by their time: simulated and on a real pipeline."""

from __future__ import annotations

import csv
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from gapless.launch.cli import main

SIMULATED = ["simulate", "model=llama-7b", "parallel=tp2", "scheduler=token_budget"]
LOOP = [
    "workload=fixed",
    "workload.input_len=320",
    "workload.output_len=20",
    "workload.max_concurrency=3",
    "workload.distinct_prompts=3",
    "hydra.run.dir=run",
]


def ran(*words: str) -> tuple[dict[str, Any], list[dict[str, str]]]:
    assert main([*words, *LOOP]) == 0
    summary = json.loads(Path("run/summary.json").read_text(encoding="utf-8"))
    path = Path("run/requests.csv")
    return summary, list(csv.DictReader(path.open(encoding="utf-8"))) if path.exists() else []


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "more",
    [[], ["simulation.replicas=2"], ["simulation.record=false"], ["simulation.faults.at=[0.05]"]],
    ids=["one", "replicas", "counted", "fault"],
)
def test_what_warms_up_leaves_its_prompts_in_the_cache(more: list[str]) -> None:
    cold, _ = ran(*SIMULATED, "workload.num_prompts=6", *more)
    warm, rows = ran(*SIMULATED, "workload.num_prompts=6", "workload.warmup_requests=6", *more)
    assert (cold["completed"], warm["completed"]) == (6, 6)
    assert cold["cached_input_tokens"] < warm["cached_input_tokens"] == 6 * 304, "whole blocks, but for the last token"
    assert warm["mean_ttft_ms"] < cold["mean_ttft_ms"]
    if rows:
        assert min(float(row["arrival_s"]) for row in rows) == 0.0


def test_pools_warm_up_too() -> None:
    summary, _ = ran(
        *SIMULATED,
        "workload.num_prompts=6",
        "workload.warmup_requests=3",
        "simulation.disaggregation.prefill_replicas=1",
    )
    assert (summary["completed"], summary["cached_input_tokens"]) == (6, 6 * 304)


def test_a_loop_ends_by_its_time_and_answers_what_was_sent() -> None:
    summary, rows = ran(*SIMULATED, "workload.duration_s=2", "workload.think_ms=100")
    sent = [float(row["arrival_s"]) for row in rows]
    assert max(sent) < 2.0 < summary["duration"]
    assert summary["completed"] == len(rows) > 10
    assert summary["failed"] == 0
    ends = sorted(at + float(row["e2el_ms"]) / 1e3 for at, row in zip(sent, rows, strict=True))
    for number, at in enumerate(sent[3:]):
        assert at == pytest.approx(ends[number] + 0.1, abs=1e-3), "three clients, each of whom has thought"
    assert all(a <= b for a, b in pairwise(sent))


def test_a_real_pipeline_is_warm_too() -> None:
    tiny = ["bench", "model=tiny", "parallel.threads=1", "scheduler=token_budget", "workload.num_prompts=4"]
    summary, rows = ran(*tiny, "workload.warmup_requests=3", "workload.think_ms=20")
    assert (summary["completed"], summary["cached_input_tokens"]) == (4, 4 * 304)
    first_end = min(float(row["arrival_s"]) + float(row["e2el_ms"]) / 1e3 for row in rows[:3])
    assert float(rows[3]["arrival_s"]) == pytest.approx(first_end + 0.02, abs=2e-3)
