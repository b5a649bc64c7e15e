"""Causes at a run's end: from a short replay, or from the explanation that its folder keeps."""

from __future__ import annotations

import html
import json
from dataclasses import replace
from functools import partial

import pytest

from gapless.launch import advising, results
from gapless.launch.advising import quick_advice
from gapless.launch.cli import main
from gapless.runtime.analysis.explain.analysed_run import AnalysedRun
from gapless.runtime.analysis.explain.explain_json import read_explanation, write_explanation
from gapless.runtime.analysis.explain.roots import Root
from gapless.runtime.analysis.report.write_folder import write_run_folder
from gapless.runtime.analysis.run_folder.read import RunFolder, read_run_folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Simulate a run of 20 s whose layers are split unevenly; the machine may have other work."""
    path = tmp_path_factory.mktemp("run")
    chosen = ["model=llama-13b", "parallel=pp2", "parallel.layers=[26,14]", "workload.num_prompts=30"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(results, "quick_advice", partial(quick_advice, share=100.0))
        patch.setattr(advising, "_SECONDS", 60.0)
        assert main(["simulate", *chosen, f"hydra.run.dir={path}"]) == 0
    return read_run_folder(path)


def test_causes_are_the_same_in_summary_page_terminal_and_explanation(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    explanation = read_explanation(run.path)
    assert explanation is not None
    first = explanation.causes[0]
    assert (first.cause, first.stage, first.change) == (Root.UNEVEN_LAYERS, 0, "layers=[20,20]")
    entry = json.loads((run.path / "summary.json").read_text(encoding="utf-8"))["causes"][0]
    assert {"cause", "seconds", "low", "high", "change", "saves_seconds"} <= entry.keys()
    assert entry["seconds"] == first.seconds
    assert main(["report", str(run.path), "figures=false"]) == 0
    words, page = AnalysedRun.read(run).words, html.unescape((run.path / "report.html").read_text(encoding="utf-8"))
    assert words[0].startswith("Uneven layers on stage 0 (26 of 40) cost ")
    printed = " ".join(capsys.readouterr().out.split())
    assert words[0] in printed
    assert words[0] in page
    assert "of which uneven layers on stage 0" in page


def test_a_damaged_explanation_is_left_out(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    kept = read_explanation(run.path)
    assert kept is not None
    try:
        (run.path / "explain.json").write_text("{", encoding="utf-8")
        assert main(["report", str(run.path), "figures=false"]) == 0
        assert "Uneven layers on stage 0" in capsys.readouterr().out  # by its spans
    finally:
        write_explanation(run.path, kept)


def test_a_short_run_is_not_replayed(run: RunFolder) -> None:
    assert quick_advice(AnalysedRun.read(run), share=0.01) is None


def test_what_a_run_says_at_its_end_is_kept(run: RunFolder, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("again")
    advised = replace(AnalysedRun.read(run), explain=partial(quick_advice, share=100.0))
    write_run_folder(path, advised)
    assert read_explanation(path) == advised.explanation
