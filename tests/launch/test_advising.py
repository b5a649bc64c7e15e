"""Advice in a run's words: from a short replay at its end, or from the explanation that its folder keeps."""

from __future__ import annotations

import html
from pathlib import Path

import pytest

from gapless.launch import advising
from gapless.launch.advising import kept_advice, quick_advice
from gapless.launch.cli import main
from gapless.runtime.ledger.advice import Interval
from gapless.runtime.ledger.explanation import METRICS, Explanation, Outcome
from gapless.runtime.run_folder.explain_json import read_explanation, write_explanation
from gapless.runtime.run_folder.read import RunFolder, read_run_folder

SAVES = "scheduler=equal_time would save 7.2% of the run (6.1 to 8.0)."


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A simulated run of 14 s."""
    path = tmp_path_factory.mktemp("run")
    command = ["simulate", "model=llama-13b", "parallel=pp2", "workload.num_prompts=30", f"hydra.run.dir={path}"]
    assert main(command) == 0
    return read_run_folder(path)


def explanation(saves: Interval) -> Explanation:
    outcome = Outcome("scheduler=equal_time", ("scheduler=equal_time",), None, dict.fromkeys(METRICS, saves))
    values = dict.fromkeys(METRICS, 1.0)
    return Explanation("duration", values, values, (outcome,), (), (), requests=30, replayed=30, seeds=4)


def test_a_report_names_the_advice_that_its_folder_keeps(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(run.path)
    assert kept_advice(run.path) is None
    assert main(["report", path, "figures=false"]) == 0
    assert "(scheduler=equal_time) would save at most" in capsys.readouterr().out
    try:
        write_explanation(run.path, explanation(Interval(0.072, 0.061, 0.08)))
        assert main(["report", path, "figures=false"]) == 0
        assert SAVES in capsys.readouterr().out.splitlines()
        assert SAVES in html.unescape((run.path / "report.html").read_text(encoding="utf-8"))
        write_explanation(run.path, explanation(Interval(0.01, -0.02, 0.08)))
        assert main(["report", path, "figures=false"]) == 0
        assert "No change that was replayed is sure to save anything" in capsys.readouterr().out
        (run.path / "explain.json").write_text("{", encoding="utf-8")
        assert main(["report", path, "figures=false"]) == 0
    finally:
        (run.path / "explain.json").unlink()


def test_a_short_replay_keeps_what_it_found(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advising, "_SECONDS", 30.0)  # the machine may have other work
    found = quick_advice(run, share=100.0)
    kept = read_explanation(run.path)
    (run.path / "explain.json").unlink()
    assert kept is not None
    assert found == kept.advices
    assert any("equal_time" in each.change for each in kept.advices)


def test_a_short_run_is_not_replayed(run: RunFolder) -> None:
    assert quick_advice(RunFolder(run.path, {**run.summary, "duration": 4.0})) is None
    assert not (Path(run.path) / "explain.json").exists()
