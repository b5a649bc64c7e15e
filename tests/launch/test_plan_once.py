"""A command makes the plan of each policy once: what its check works out is what its run takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hydra
import pytest
from omegaconf import DictConfig

from gapless.launch import prompts
from gapless.launch.cli import main
from gapless.runtime.engine import plan
from gapless.runtime.engine.plan import Plan

TINY = ["model=tiny", "cache.num_blocks=64", "parallel.threads=1"]
WORKLOAD = ["workload=fixed", "workload.input_len=20", "workload.output_len=4", "workload.num_prompts=40"]
SIMULATED = ["model=llama-7b", "hardware=a100-80g", *WORKLOAD]


@pytest.fixture
def plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """Every plan that is made from now on; `Plan` stays what it is."""
    made: list[Plan] = []

    def counted(**fields: Any) -> Plan:
        made.append(Plan(**fields))
        return made[-1]

    monkeypatch.setattr(plan, "Plan", counted)
    monkeypatch.chdir(tmp_path)
    return made


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "num_plans"),
    [
        (["generate", *TINY, "prompt=x", "sampling.max_tokens=2"], 1),
        (["generate", "-m", *TINY, "prompt=x", "sampling.max_tokens=2", "scheduler=sarathi,orca_best"], 2),
        (["bench", *TINY, *WORKLOAD, "scheduler=sarathi,orca_best", "repeats=2"], 2),
        (["simulate", *SIMULATED, "scheduler=sarathi,orca_best", "repeats=2"], 2),
        (["simulate", "-m", *SIMULATED, "scheduler.chunk=64,128,256"], 3),
        (["capacity", *SIMULATED, "scheduler=sarathi,orca_best", "slo.ttft_p99_ms=500", "seeds=1", "precision=0.2"], 2),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else str(value),
)
def test_a_command_plans_each_policy_once(arguments: list[str], num_plans: int, plans: list[Plan]) -> None:
    assert main(arguments) == 0
    assert len(plans) == num_plans


def test_prompts_are_read_once(tmp_path: Path, plans: list[Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "prompts.txt").write_text("one\ntwo\n", encoding="utf-8")
    read: list[Path] = []
    whole = prompts.open_rows
    monkeypatch.setattr(prompts, "open_rows", lambda path, *rest: read.append(path) or whole(path, *rest))
    assert main(["generate", *TINY, "prompts=prompts.txt", "sampling.max_tokens=2"]) == 0
    assert [path.name for path in read] == ["prompts.txt"]


@pytest.mark.parametrize(
    ("words", "times", "folder"),
    [
        (["hydra.run.dir=${scheduler.name}_${workload.num_prompts}"], 1, "equal_time_40"),
        (["-m", "seed=1,2", "hydra.sweep.dir=${scheduler.name}"], 2, "equal_time/1"),
    ],
)
def test_each_run_is_composed_once(
    words: list[str], times: int, folder: str, plans: list[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    composed: list[str] = []
    whole = hydra.compose

    def counted(config_name: str, *rest: Any, **options: Any) -> DictConfig:
        composed.append(config_name)
        return whole(config_name, *rest, **options)

    monkeypatch.setattr(hydra, "compose", counted)
    assert main(["simulate", *SIMULATED, *words]) == 0
    assert composed == ["simulate"] * times
    assert Path(folder, ".hydra", "overrides.yaml").is_file()
