"""`gapless explain` in this process: its advice, the command that it prints, and errors."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from gapless.launch.cli import main

SMALL = ["model=llama-7b", "parallel=pp2", "workload.num_prompts=60", "workload.min_len=100", "workload.max_len=800"]


def loaded(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


def best_command(out: str) -> list[str]:
    """Return the words of the command under `best:`, without the program."""
    lines = out.splitlines()
    program, *words = shlex.split(lines[lines.index("best:") + 1])
    assert program == "gapless"
    return words


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (["scheduler.chunk=16"], "scheduler"),
        (["parallel.layers=[24,8]", "scheduler=equal_time"], "parallel.layers="),
        (["simulation.jitter=0.1", "parallel.layers=[8,24]"], "parallel.layers="),
    ],
    ids=["chunk", "layers", "layers and jitter"],
)
def test_advice_taken_does_what_was_foretold(
    bad: list[str], named: str, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *SMALL, *bad, "hydra.run.dir=base"]) == 0
    capfd.readouterr()
    assert main(["explain", "base"]) == 0
    out = capfd.readouterr().out
    assert "replay of the unchanged run: duration" in out
    assert "numbers  base/explain.json" in out
    found = loaded(here / "base" / "explain.json")
    best = found["outcomes"][0]
    assert best["command"] in out
    assert any(text.startswith(named) for text in best["overrides"])
    assert main([*best_command(out), "hydra.run.dir=better"]) == 0
    before, after = loaded(here / "base" / "summary.json"), loaded(here / "better" / "summary.json")
    for metric in ("duration", "p99_itl_ms", "p99_ttft_ms"):
        saves = best["saves"][metric]
        assert saves["low"] - 1e-6 <= 1 - after[metric] / before[metric] <= saves["high"] + 1e-6


def test_changes_of_the_user_are_tried_alone(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *SMALL, "hydra.run.dir=base"]) == 0
    command = [
        "explain",
        "base",
        "scheduler=token_budget,sarathi",
        "scheduler.max_batch=64",
        "parallel.layers=[18,14]",
        "out=told",
        "objective=p99_itl_ms",
    ]
    assert main(command) == 0
    found = loaded(here / "told" / "explain.json")
    assert {tuple(outcome["overrides"]) for outcome in found["outcomes"]} == {
        (
            "scheduler=token_budget",
            "scheduler.max_batched_tokens=256",
            "scheduler.max_batch=64",
            "parallel.layers=[18,14]",
        ),
        ("scheduler=sarathi", "scheduler.chunk=256", "scheduler.max_batch=64", "parallel.layers=[18,14]"),
    }
    assert found["metric"] == "p99_itl_ms"
    assert not (here / "base" / "explain.json").exists()
    assert "told/explain.json" in capfd.readouterr().out


@pytest.mark.slow
def test_a_turn_of_a_comparison_has_a_command_of_its_own(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rate = "workload.request_rate=inf"
    assert (
        main(["simulate", *SMALL, rate, "scheduler=sarathi,equal_time", "scheduler.chunk=16", "hydra.run.dir=both"])
        == 0
    )
    capfd.readouterr()
    assert main(["explain", "both/01_sarathi", "scheduler.chunk=128"]) == 0
    words = best_command(capfd.readouterr().out)
    assert words[0] == "simulate"
    assert {"scheduler=sarathi", "scheduler.chunk=128", rate, "workload.num_prompts=60"} <= set(words)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "run: give the run folder, as in gapless explain runs/DATE_TIME"),
        (["base", "base"], "run: give one run folder only, as in gapless explain runs/DATE_TIME"),
        (["nowhere"], "nowhere: no such folder"),
        (["base", "scheduler.chonk=5"], "scheduler.chonk: unknown key; did you mean 'scheduler.chunk'?"),
        (
            ["base", "workload.num_prompts=5"],
            "workload.num_prompts: cannot be replayed; change keys of scheduler, parallel, cache, simulation, hardware "
            "or cluster",
        ),
        (["base", "scheduler.chunk=none"], "scheduler.chunk='none': must be an integer or auto"),
        (["base", "scheduler.chunk=0"], "scheduler.chunk=0: must be auto or 1 or more"),
        (["base", "parallel.layers=[30,3]"], "parallel.layers=[30, 3]: "),
        (["base", "seeds=1"], "seeds=1: must be 3 to 1000"),
        (["base", "objective=speed"], "objective='speed': must be auto, duration, p99_itl_ms or p99_ttft_ms"),
        (["base", "changes=[chunk]"], "changes='chunk': expected KEY=VALUE"),
        (["."], ".: has 2 runs; give one of them, as "),
    ],
)
def test_errors(
    runs: Path,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(runs)
    assert main(["explain", *arguments]) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith(f"gapless: error: {message}")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for name in ("base", "other"):
        assert main(["simulate", *SMALL, "workload.num_prompts=10", f"hydra.run.dir={folder / name}"]) == 0
    return folder
