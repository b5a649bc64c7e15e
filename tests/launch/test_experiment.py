"""`gapless simulate experiment=paper/NAME` in this process: choices, overrides, what it prints and leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gapless.conf.build import group_names, load_group
from gapless.conf.schema import SimulateConfig
from gapless.launch import compose
from gapless.launch.cli import main
from gapless.runtime.experiments import EXPERIMENTS


def one(*overrides: str) -> SimulateConfig:
    return compose.compose_one(overrides, SimulateConfig, "simulate")


def test_every_experiment_has_its_file() -> None:
    assert {load_group("experiment", name)["experiment"] for name in group_names("experiment")} == set(EXPERIMENTS)
    assert [f"paper/{name}" for name in sorted(EXPERIMENTS)] == group_names("experiment")


def test_an_experiment_chooses_groups_and_other_keys_hold_over_its_own() -> None:
    config = one("experiment=paper/figure12")
    assert (config.model.name, config.parallel.pp, config.scheduler.batch) == ("gpt3-175b", 8, 27)
    assert (config.workload.num_prompts, config.simulation.host) == (10000, False)
    config = one("experiment=paper/figure12", "workload.num_prompts=5", "simulation.host=true", "hardware=h200")
    assert (config.workload.num_prompts, config.simulation.host, config.hardware.name) == (5, True, "h200")
    assert one("model=llama-13b", "parallel=local").experiment is None


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["experiment=paper/figure1"], "experiment=paper/figure1: unknown; did you mean 'paper/figure13'?"),
        (["experiment=table2"], "experiment=table2: unknown; did you mean 'paper/table2'?"),
        (
            ["experiment=paper/figure9", "scheduler=orca_best,sarathi"],
            "scheduler: experiment=figure9 runs policies of its own, each once",
        ),
        (
            ["experiment=paper/table4", "scheduler=orca_best"],
            "scheduler=orca_best: experiment=table4 runs policies of its own, as the paper has them",
        ),
        (
            ["experiment=paper/figure9", "simulation.record=false"],
            "simulation.record=false: experiment=figure9 counts what each request lost; leave it true",
        ),
        (["experiment=paper/figure9", "repeats=2"], "repeats: experiment=figure9 runs policies of its own, each once"),
        (
            ["experiment=paper/figure9", "scheduler.chnk=2"],
            "scheduler.chnk: unknown key; did you mean 'scheduler.chunk'?",
        ),
    ],
)
def test_each_error_is_one_line_and_starts_nothing(
    arguments: list[str], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["simulate", *arguments]) == 2
    assert capfd.readouterr() == ("", f"gapless: error: {line}\n")
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_of_experiments_prints_and_writes_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    chosen = ["-m", "experiment=paper/table2,paper/figure7", "hardware=a100-80g", "hydra.sweep.dir=out"]
    assert main(["simulate", *chosen]) == 0
    output = capfd.readouterr().out
    for place, name in enumerate(("Table 2", "Figure 7")):
        assert name in output
        rows = json.loads((tmp_path / f"out/{place}/paper.json").read_text(encoding="utf-8"))
        assert {row["artifact"] for row in rows} == {name}
        assert list((tmp_path / f"out/{place}").glob("*.png"))
