"""`gapless report`: one run's report again, the comparison of several, and errors in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gapless.launch.cli import main
from gapless.runtime.core.messages import Span
from gapless.runtime.core.request_record import RequestRecord
from gapless.runtime.core.run_record import DecodesRecord, MicroBatchRecord, RunRecord, SegmentRecord
from tests.support.tiers import HANGS_S
from tests.support.written_runs import write_run


def run_folder(path: Path, chunk: int, seconds: float) -> Path:
    """Write a run of one request, a chunk and a decode, on one stage: `seconds` each."""
    prefill, decode = [SegmentRecord(0, 0, chunk)], DecodesRecord.at([0], [chunk])
    micro_batches = [MicroBatchRecord(0, 0.0, prefill, DecodesRecord.at()), MicroBatchRecord(1, seconds, [], decode)]
    spans = [Span(n, 0, n * seconds, n * seconds, n * seconds, (n + 1) * seconds, (n + 1) * seconds) for n in (0, 1)]
    requests = [RequestRecord(0, chunk, 0.0, [seconds, 2 * seconds], 0.0, 2 * seconds, "length")]
    micro_batches[1].predicted = [1.5 * seconds]
    record = RunRecord(1, 8, micro_batches, spans, requests, notes=[f"chunk=auto picked {chunk}"])
    write_run(path, record, {"scheduler": {"name": "sarathi", "chunk": chunk}, "model": {"name": "tiny"}})
    return path


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a sweep's folder: 0 to 2, and a repeat of 2, each twice as slow as the one before."""
    monkeypatch.chdir(tmp_path)
    for number, chunk in enumerate([256, 128, 64, 64]):
        run_folder(tmp_path / "multirun" / "a" / str(number), chunk, 0.1 * 2**number)
    return tmp_path / "multirun"


def test_one_run(runs: Path, capsys: pytest.CaptureFixture[str]):
    folder = runs / "a" / "0"
    (folder / "report.html").unlink()
    assert main(["report", str(folder), "slo.ttft_ms=50"]) == 0
    out = capsys.readouterr().out
    assert "1 request in " in out
    assert "predicted stage times are off by 50.0% (p50), 50.0% (p90)" in out
    assert "goodput: 0.00 of 5.00 requests/s met the SLO" in out
    assert "chunk=auto picked 256" in out
    assert "multirun/a/0/report.html" in out.splitlines()[-1]
    assert "gapless: tiny, sarathi" in (folder / "report.html").read_text(encoding="utf-8")
    assert (folder / "figures" / "predictions.png").is_file()


def test_figures_where_a_notebook_s_backend_is_missing(runs: Path):
    """A notebook hands the name of its own down to the commands that it runs."""
    command = [sys.executable, "-m", "gapless", "report", str(runs / "a" / "0")]
    environment = os.environ | {"MPLBACKEND": "module://no_such_package.backend"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANGS_S)
    assert done.returncode == 0, done.stderr
    assert (runs / "a" / "0" / "figures" / "timeline.png").is_file()


def test_a_sweep(runs: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["report", "multirun", "sort=median_ttft_ms", "figures=false"]) == 0
    out = capsys.readouterr().out
    assert "3 settings, 4 runs" in out
    assert "multirun/report.html" in out
    found = json.loads((runs / "comparison.json").read_text())
    assert found["ranking"] == ["sarathi chunk=256", "sarathi chunk=128", "sarathi chunk=64"]
    assert [len(row["runs"]) for row in found["candidates"]] == [1, 1, 2]
    ratio = found["candidates"][2]["metrics"]["median_ttft_ms"]["ratio"]
    assert ratio == pytest.approx(6.0)  # the median of 4 and 8 times
    assert not (runs / "figures").exists()


def test_several_folders_and_where_they_go(runs: Path, capsys: pytest.CaptureFixture[str]):
    arguments = ["report", "multirun/a/1", "multirun/a/0", "figures=false"]
    assert main([*arguments, "out=there", "slo.ttft_ms=150"]) == 0
    assert "gapless diff multirun/a/1 multirun/a/0\n" in capsys.readouterr().out
    found = json.loads((runs.parent / "there" / "comparison.json").read_text())
    assert [row["label"] for row in found["candidates"]] == ["sarathi chunk=128", "sarathi chunk=256"]
    goodput = [row["metrics"]["request_goodput"]["median"] for row in found["candidates"]]
    assert goodput == pytest.approx([0.0, 5.0])
    (runs / "a" / "0").rename(runs / "a" / "tuned")
    (runs / "a" / "1").rename(runs / "a" / "base")
    arguments = ["report", "multirun/a/base", "multirun/a/tuned/", "figures=false"]
    assert main([*arguments, "out=there"]) == 0
    found = json.loads((runs.parent / "there" / "comparison.json").read_text())
    assert found["ranking"] == ["tuned: sarathi chunk=256", "base: sarathi chunk=128"]
    for name in ("comparison", "comparison_2"):
        assert main(arguments) == 0
        assert (runs / "a" / name / "report.html").is_file()
    capsys.readouterr()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "runs: "),
        (["nowhere"], "nowhere: no such folder"),
        (["multirun/a/0/summary.json"], "multirun/a/0/summary.json: not a folder"),
        (["empty"], "empty: not a run folder, and contains none"),
        (
            ["multirun", "sort=output_throughpt"],
            "sort=output_throughpt: no number of these runs' summary.json; did you mean 'output_throughput'?",
        ),
        (
            ["multirun", "out=multirun/a/0/summary.json"],
            "out=multirun/a/0/summary.json: multirun/a/0/summary.json is a file; give a folder",
        ),
    ],
)
def test_errors(runs: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    (runs.parent / "empty").mkdir()
    assert main(["report", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("gapless: error: ")
    assert message in line


TRACES = Path(__file__).parents[1] / "runtime/analysis/traces/vllm_pp2"


def test_traces_of_another_engine_become_a_run_folder(
    tmp_path: Path, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    traces = tmp_path / "traces"
    traces.mkdir()
    for path in TRACES.iterdir():
        (traces / path.name).write_bytes(path.read_bytes())
    assert main(["report", "import=kineto", str(traces)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("vLLM: traces, imported from torch profiler traces\n11 micro-batches in 281 ms: ")
    assert "Receives of stage 1 took" in out
    assert "TTFT" not in out
    folder = traces / "imported"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["unknown"] == ["requests", "kv", "queue"]
    assert not {"completed", "median_ttft_ms", "peak_kv_fraction", "output_throughput"} & set(summary)
    assert sorted(path.stem for path in (folder / "figures").iterdir()) == [
        "batch_composition",
        "bubbles_by_stage",
        "stage_times",
        "timeline",
    ]
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "<h2>Micro-batches</h2>" in page
    assert "<h2>Requests</h2>" not in page
    assert "<h2>Latency</h2>" not in page
    assert main(["report", str(folder), "figures=false"]) == 0  # it is read back as what it was
    again = capsys.readouterr().out
    assert out.splitlines()[1] == again.splitlines()[1]
    beside = ["report", str(folder), str(runs / "a" / "0"), "sort=bubble_fraction", "out=both", "figures=false"]
    assert main(beside) == 0
    (traces / "imported").rename(tmp_path / "other")
    assert main(["report", "import=kineto", str(traces), "figures=false"]) == 0
    capsys.readouterr()
    assert main(["report", str(folder), str(tmp_path / "other"), "figures=false"]) == 0  # ranked by no throughput
    assert "2 settings" in capsys.readouterr().out


def test_an_unknown_format_is_refused(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "import=nsys"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "import='nsys': must be null or kineto" in line


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "runs: give the trace folder, as in gapless report import=kineto TRACES"),
        (["nowhere"], "nowhere: no such file or folder"),
        (["multirun"], "multirun: contains no trace (.json or .json.gz)"),
        (["multirun/a/0/summary.json"], "multirun/a/0/summary.json: not a Chrome trace: it has no traceEvents"),
    ],
)
def test_what_holds_no_trace(arguments: list[str], line: str, runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "import=kineto", *arguments]) == 2
    assert line in capsys.readouterr().err
