"""A command makes the plan of each policy once: what its check works out is what its run takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
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


@pytest.mark.parametrize(("arguments", "num_plans"), [
    (["generate", *TINY, "prompt=x", "sampling.max_tokens=2"], 1),
    (["generate", "-m", *TINY, "prompt=x", "sampling.max_tokens=2", "scheduler=sarathi,orca_best"], 2),
    (["bench", *TINY, *WORKLOAD, "scheduler=sarathi,orca_best", "repeats=2"], 2),
    (["simulate", *SIMULATED, "scheduler=sarathi,orca_best", "repeats=2"], 2),
    (["simulate", "-m", *SIMULATED, "scheduler.chunk=64,128,256"], 3),
    (["capacity", *SIMULATED, "scheduler=sarathi,orca_best", "slo.ttft_p99_ms=500", "seeds=1", "precision=0.2"], 2),
], ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else str(value))  # fmt: skip
def test_a_command_plans_each_policy_once(arguments: list[str], num_plans: int, plans: list[Plan]) -> None:
    assert main(arguments) == 0
    assert len(plans) == num_plans


def test_prompts_are_read_once(tmp_path: Path, plans: list[Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "prompts.txt").write_text("one\ntwo\n", encoding="utf-8")
    read: list[Path] = []
    whole = prompts._open
    monkeypatch.setattr(prompts, "_open", lambda path: read.append(path) or whole(path))
    assert main(["generate", *TINY, "prompts=prompts.txt", "sampling.max_tokens=2"]) == 0
    assert [path.name for path in read] == ["prompts.txt"]


def test_a_run_is_composed_once(plans: list[Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    composed: list[str | None] = []
    whole = ConfigLoaderImpl.load_configuration

    def counted(loader: ConfigLoaderImpl, config_name: str | None, *rest: Any, **options: Any) -> DictConfig:
        composed.append(config_name)
        return whole(loader, config_name, *rest, **options)

    monkeypatch.setattr(ConfigLoaderImpl, "load_configuration", counted)
    assert main(["simulate", *SIMULATED, "hydra.run.dir=${scheduler.name}_${workload.num_prompts}"]) == 0
    assert composed == ["simulate"]
    assert Path("sarathi_40", ".hydra", "overrides.yaml").is_file()
