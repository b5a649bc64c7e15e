"""Advice in a run's words: from a short replay at its end, or from the explanation that its folder keeps."""

from __future__ import annotations

import html
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from gapless.launch import advising
from gapless.launch.advising import quick_advice
from gapless.launch.cli import main
from gapless.runtime.explain.analysed_run import AnalysedRun
from gapless.runtime.explain.explain_json import read_explanation, write_explanation
from gapless.runtime.explain.explanation import METRICS, Explanation, Interval, Outcome
from gapless.runtime.report.write_folder import write_run_folder
from gapless.runtime.run_folder.read import RunFolder, read_run_folder

SAVES = "scheduler=equal_time would save 7.2% of the run (6.1 to 8.0)."


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Simulate a run of 14 s."""
    path = tmp_path_factory.mktemp("run")
    chosen = ["model=llama-13b", "parallel=pp2", "scheduler=sarathi", "workload.num_prompts=30"]
    assert main(["simulate", *chosen, f"hydra.run.dir={path}"]) == 0
    return read_run_folder(path)


def explanation(saves: Interval) -> Explanation:
    outcome = Outcome("scheduler=equal_time", ("scheduler=equal_time",), None, dict.fromkeys(METRICS, saves))
    values = dict.fromkeys(METRICS, 1.0)
    return Explanation("duration", values, values, (outcome,), (), requests=30, replayed=30, seeds=4)


def test_a_report_names_the_advice_that_its_folder_keeps(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(run.path)
    assert AnalysedRun.read(run).advice is None
    assert main(["report", path, "figures=false"]) == 0
    assert "More requests at once would fill that time" in capsys.readouterr().out
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


def test_a_short_replay_keeps_what_it_found(run: RunFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(advising, "_SECONDS", 30.0)  # the machine may have other work
    advised = replace(AnalysedRun.read(run), explain=partial(quick_advice, share=100.0))
    write_run_folder(tmp_path, advised)
    assert advised.explanation is not None
    assert read_explanation(tmp_path) == advised.explanation
    assert any("equal_time" in each.change for each in advised.advice or ())


def test_a_short_run_is_not_replayed(run: RunFolder) -> None:
    assert quick_advice(AnalysedRun.read(run), share=0.01) is None
