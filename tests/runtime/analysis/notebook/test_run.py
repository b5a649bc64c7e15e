"""A run folder read in Python: tables say what the files say, and what is asked for wrongly ends in one clear line."""

from __future__ import annotations

import csv
import gzip
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import gapless
from gapless import Run, Table, read_run
from gapless.conf.errors import ConfigError
from gapless.launch.cli import main

COMMON = ["workload.num_prompts=40", "workload.request_rate=2"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a run over two stages, a fleet of two such replicas, and a fleet of a prefill and a decode pool."""
    path = tmp_path_factory.mktemp("runs")
    runs = {
        "run": ["scheduler=equal_time"],
        "fleet": ["simulation.replicas=2"],
        "pools": ["simulation.disaggregation.prefill_replicas=1"],
    }
    for name, own in runs.items():
        simulate = ["simulate", "model=llama-33b", "parallel=pp2", *COMMON, *own, f"hydra.run.dir={path / name}"]
        assert main(simulate) == 0
    return path


@pytest.fixture(scope="module")
def run(folders: Path) -> Run:
    return read_run(folders / "run")


@pytest.fixture(scope="module")
def fleet(folders: Path) -> Run:
    return read_run(folders / "fleet")


def rows_of(path: Path) -> list[dict[str, str]]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open(newline="") as file:
        return list(csv.DictReader(file))


def assert_same(table: Table, rows: list[dict[str, str]]) -> None:
    """Check that the table holds what the file holds: nanoseconds, and sums that were rounded to microseconds."""
    assert list(table) == list(rows[0])
    assert table.num_rows == len(rows)
    for name, column in table.items():
        texts = [row[name] for row in rows]
        if column.dtype.kind == "U":
            assert column.tolist() == texts, name
        else:
            expected = [float(text) if text else np.nan for text in texts]
            precision = 1.1e-3 if name.endswith("_ms") else 1.1e-9
            np.testing.assert_allclose(column, expected, rtol=0, atol=precision, err_msg=name)


def test_the_package_has_it_at_its_top() -> None:
    assert gapless.read_run is read_run


def test_requests_and_spans_are_those_of_the_files(run: Run) -> None:
    assert_same(run.requests, rows_of(run.path / "requests.csv"))
    assert_same(run.spans, rows_of(run.path / "spans.csv.gz"))
    assert np.isfinite(run.spans["predicted_ms"]).any()


@pytest.mark.parametrize("name", ["fleet", "pools"])
def test_a_fleet_s_requests_are_those_of_its_file(folders: Path, name: str) -> None:
    run = read_run(folders / name)
    assert_same(run.requests, rows_of(run.path / "requests.csv"))


@pytest.mark.parametrize("name", ["run", "fleet", "pools"])
def test_idle_seconds_are_those_of_the_summary(folders: Path, name: str) -> None:
    run = read_run(folders / name)
    for cause, seconds in run.summary["bubble_seconds"].items():
        assert run.idle["seconds"][run.idle["cause"] == cause].sum() == pytest.approx(seconds, abs=1e-6), cause
    assert (run.idle["end"] > run.idle["begin"]).all()
    assert run.idle["begin"].min() >= 0.0


def test_tokens_and_micro_batches_add_up(run: Run) -> None:
    tokens, requests = run.tokens, run.requests
    assert tokens.num_rows == run.summary["total_output_tokens"] == requests["output_tokens"].sum()
    for number in requests["request"][:5]:
        of_one = tokens["request"] == number
        first, arrival = tokens["time"][of_one][0], requests["arrival_s"][requests["request"] == number][0]
        ttft = requests["ttft_ms"][requests["request"] == number][0]
        assert 1e3 * (first - arrival) == pytest.approx(ttft, abs=2e-3)
        gaps = tokens["tbt_ms"][of_one]
        assert np.isnan(gaps[0])
        np.testing.assert_allclose(gaps[1:], 1e3 * np.diff(tokens["time"][of_one]), atol=1e-6)
    batches = run.micro_batches
    assert batches.num_rows == run.summary["micro_batches"]
    assert batches["prefill_tokens"].sum() == requests["prompt_tokens"].sum()
    inner = (run.idle["step"] >= 0) & (run.idle["cause"] != "fill_drain")
    assert batches["bubble_ms"].sum() == pytest.approx(1e3 * run.idle["seconds"][inner].sum())


def test_the_record_and_the_ledger_of_one_run(run: Run) -> None:
    assert run.ledger.num_stages == run.record.num_stages == 2
    assert run.config["model"]["name"] == "llama-33b"
    assert run.replicas == [run]
    assert not run.is_fleet


def test_a_fleet_is_its_replicas_on_one_clock(fleet: Run) -> None:
    assert fleet.is_fleet
    for number, replica in enumerate(fleet.replicas):
        start = fleet.summary["replica_starts"][number]
        of_it = fleet.spans["replica"] == number
        np.testing.assert_allclose(fleet.spans["begin"][of_it], replica.spans["begin"] + start, atol=1e-9)
        assert (fleet.tokens["replica"] == number).sum() == replica.tokens.num_rows
    with pytest.raises(ConfigError, match=r"^ledger: .*fleet is of 2 replicas; ask replicas\[NUMBER\]\.ledger$"):
        _ = fleet.ledger


def test_words_blame_and_explanation(run: Run, fleet: Run) -> None:
    assert run.explanation is not None
    assert fleet.explanation is None
    assert run.words[0].endswith(".")
    assert fleet.words[0].endswith(".")
    charges = run.blame.tbt
    assert charges.cost.sum() + charges.unrecorded == pytest.approx(charges.lost.sum())
    assert 1e3 * charges.cost == pytest.approx(run.requests["cost_others_tbt_ms"], abs=1e-3)


def test_pictures(run: Run, fleet: Run) -> None:
    assert run.figures[0] == "timeline"
    assert {"bubbles_by_stage", "ttft", "predictions"} <= {*run.figures}
    for name in run.figures:
        shown = run.plot(name)._repr_png_()  # type: ignore[attr-defined]
        assert shown.startswith(b"\x89PNG"), name
    (axes,) = run.plot(window=(1.0, 1.5)).axes
    assert axes.get_xlim() == (1.0, 1.5)
    assert len(fleet.plot().axes) == 2
    assert run.plot("ttft").axes[0].texts[0].get_text().endswith(", simulated")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("timline",), "plot('timline'): no such picture; did you mean 'timeline'?"),
        (("ttft", (0.0, 1.0)), "window: only the timeline has one"),
        (
            ("timeline", (2.0, 1.0)),
            "window=(2.0, 1.0): must be its start, then its end, in seconds from the run's start",
        ),
    ],
)
def test_a_picture_that_is_not_there(run: Run, arguments: tuple[str, ...], error: str) -> None:
    with pytest.raises(ConfigError) as raised:
        run.plot(*arguments)  # type: ignore[arg-type]
    assert str(raised.value) == error


def test_what_is_no_run_folder_or_column_is_named(tmp_path: Path, run: Run) -> None:
    with pytest.raises(ConfigError, match=r"not a run folder: it has no summary\.json"):
        read_run(tmp_path)
    with pytest.raises(ConfigError, match=r"^spans\['begn'\]: no such column; did you mean 'begin'\?$"):
        run.spans["begn"]
    assert "begn" not in run.spans


def test_the_document_s_example(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (Path(__file__).parents[4] / "docs/run_folder.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/first").symlink_to(run.path)
    monkeypatch.chdir(tmp_path)
    exec(example, {})
    first, compute, idle = capsys.readouterr().out.splitlines()
    assert first == repr(run)
    assert 1.0 < float(compute.split()[0]) < 1e3
    assert float(idle.split()[0]) == pytest.approx(run.summary["bubble_seconds"]["pb3_decode_context"], abs=1e-6)
    assert (tmp_path / "ttft.png").is_file()


def test_what_a_notebook_shows(run: Run) -> None:
    page = run._repr_html_()
    assert run.title in page
    assert f"{run.summary['output_throughput']:,.1f} tok/s" in page
    assert "fill and drain" in page
    assert page.index("PB3 decode context") < page.index("transport"), "the largest cause is first"
    assert repr(run).startswith(f"{run.title} (output ")
    assert "10 of" in run.spans._repr_html_()
    assert "nan" not in run.tokens._repr_html_()
    assert repr(run.requests).startswith("requests: 40 rows of request, prompt_tokens, ")


@pytest.mark.parametrize("package", ["pandas", "polars"])
def test_frames(run: Run, package: str) -> None:
    pytest.importorskip(package)
    for table in (run.requests, run.micro_batches, run.spans, run.idle, run.tokens):
        frame = getattr(table, package)()
        assert list(frame.columns) == list(table)
        assert frame.shape == (table.num_rows, len(table))
    assert frame["time"].to_numpy().tolist() == run.tokens["time"].tolist()


@pytest.mark.parametrize("missing", ["pandas", "polars"])
def test_a_package_that_is_missing_is_named(run: Run, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ConfigError) as raised:
        getattr(run.requests, missing)()
    assert str(raised.value) == f"{missing}: not installed; pip install {missing}, or use the columns, which are numpy"
