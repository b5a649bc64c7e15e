"""Tests of comparisons: grouping of runs, labels of settings, and their numbers on the page, in files and tables."""

from __future__ import annotations

import base64
import csv
import json
import re
import zlib
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from gapless.conf.errors import ConfigError
from gapless.runtime.analysis.report.comparison_table import comparison_table
from gapless.runtime.analysis.report.metrics import (
    LATENCY,
    METRICS,
    Metric,
    best_of,
    number,
    number_keys,
    ranked,
    spread,
)
from gapless.runtime.analysis.report.run_groups import RunGroup, differing_keys, group_runs, settings
from gapless.runtime.analysis.report.write_comparison import write_comparison
from gapless.runtime.analysis.run_folder.read import RunFolder, read_run_folder
from gapless.runtime.core.run_record import RunRecord, Wait
from tests.support.hand_made import config, folder, one_stage, run_group
from tests.support.written_runs import write_run


def labels(*folders: RunFolder) -> list[str]:
    return [c.label for c in group_runs(folders)]


def test_equal_configs_are_repeats():
    runs = [folder("a"), folder("b", chunk=128), folder("c"), folder("d", name="orca_best"), folder("e", chunk=128)]
    runs[2].summary["config"] |= {"outputs": "elsewhere", "print_texts": False, "slo": {"ttft_ms": 1.0}}
    found = group_runs(runs)
    assert [[run.path.name for run in c.runs] for c in found] == [["a", "c"], ["b", "e"], ["d"]]
    assert [c.label for c in found] == ["sarathi chunk=256", "sarathi chunk=128", "orca_best"]


def test_labels_say_what_differs():
    assert labels(folder()) == ["sarathi"]
    assert labels(folder(), folder(chunk="auto")) == ["sarathi chunk=256", "sarathi chunk=auto"]
    assert labels(folder(), folder(depth=3)) == ["depth=null", "depth=3"]
    assert labels(folder(chunk=1, depth=2), folder(chunk=2, depth=3)) == ["chunk=1 depth=2", "chunk=2 depth=3"]
    assert labels(folder(), folder(name="equal_time", chunk=64)) == ["sarathi", "equal_time"]
    mixed = [folder(), folder(name="orca_best", depth=4), folder(depth=4)]
    assert labels(*mixed) == ["sarathi depth=null", "orca_best depth=4", "sarathi depth=4"]
    older = RunFolder(Path("x"), {"config": config() | {"scheduler": {"name": "sarathi", "batch": None}}, "title": "t"})
    assert labels(folder(), older, RunFolder(Path("y"), {})) == ["sarathi", "sarathi (2)", "y"]


def test_runs_are_called_by_the_names_that_users_gave_them():
    runs = [folder("a"), folder("b", chunk=128), folder("c")]
    names = {runs[0].path: "before", runs[2].path: "after"}
    assert [c.label for c in group_runs(runs[::2], names)] == ["before", "after"]
    found = [c.label for c in group_runs(runs, names)]
    assert found == ["before: sarathi chunk=256", "sarathi chunk=128", "after: sarathi chunk=256"]
    far = [folder("a", chunk=1, depth=2), folder("b", chunk=2, depth=3, name="equal_time", batch=12345678)]
    far[1].summary["config"]["model"] = {"name": "a-model-with-a-long-name"}
    assert [c.label for c in group_runs(far, {run.path: run.path.name for run in far})][1] == "b"


def test_keys_of_one_policy_do_not_differ_between_policies():
    points = [settings(config(**kind)) for kind in ({}, {"name": "equal_time", "chunk": 64}, {"name": "orca_best"})]
    assert differing_keys(points) == ["scheduler.name"]
    points.append(settings(config(chunk=16)))
    assert differing_keys(points) == ["scheduler.name", "scheduler.chunk"]


def repeated(label: str, key: str, *values: float, chunk: int = 256) -> RunGroup:
    return RunGroup(label, [folder(f"{label}{n}", chunk=chunk, **{key: v}) for n, v in enumerate(values)])


def test_medians_ratios_and_the_median_run():
    first, second = repeated("a", "output_throughput", 10, 14, 30), repeated("b", "output_throughput", 28, 20, 22, 40)
    found = spread(second, "output_throughput", first)
    assert found is not None
    assert (found.median, found.low, found.high, found.ratio) == (25.0, 20.0, 40.0, 25 / 14)
    assert (first.median_run.path.name, second.median_run.path.name) == ("a1", "b2")  # of two the slower one
    assert spread(first, "p99_itl_ms") is None
    assert ranked([first, second], "output_throughput") == [second, first]
    tails = [run_group(name, chunk=n, p99_itl_ms=n) for n, name in ((3, "x"), (1, "y"))] + [first]
    assert [c.label for c in ranked(tails, "p99_itl_ms")] == ["y", "x", "a"]  # lowest first, without it last


def test_numbers_of_a_summary():
    summary = {"a": 1, "b": {"c": 2.5, "d": None}, "e": True, "f": [1], "g": float("nan"), "config": {"seed": 3}}
    assert number_keys(summary) == ["a", "b.c"]
    assert number(summary, "b.c") == 2.5
    assert number(summary, "b.c.x") is None


def test_what_is_written_alike_has_no_best():
    metric = LATENCY[0]
    assert best_of(metric, [spread(run_group("a", **{metric.key: v}), metric.key) for v in (10.01, 10.02)]) is None
    assert best_of(metric, [spread(run_group("a", **{metric.key: v}), metric.key) for v in (10.0, 20.0)]) == "10.0 ms"
    counted = next(m for m in METRICS if m.key == "micro_batches")
    assert best_of(counted, [spread(run_group("a", micro_batches=v), counted.key) for v in (1, 2)]) is None


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        ("ms", 1500.0, "1.50 s"),
        ("ms", 0.0, "0 ms"),
        ("ms", 0.0457, "45.7 µs"),
        ("share", 0.123, "12.3%"),
        ("seconds", 0.0, "0"),
        ("count", 7.0, "7"),
        ("rate", 1234.0, "1,234"),
        ("ratio", 0.456, "0.46"),
    ],
)
def test_how_numbers_are_written(kind: str, value: float, text: str):
    assert Metric("k", "n", kind).text(value) == text  # type: ignore[arg-type]


def slower(record: RunRecord, factor: float) -> RunRecord:
    """Multiplies all times of a run by `factor`."""
    for span_at, s in enumerate(record.spans):
        times = [10 + factor * (t - 10) for t in (s.ready, s.input, s.begin, s.end, s.sent)]
        record.spans[span_at] = type(s)(s.micro_batch, s.stage, *times)
    for micro_batch in record.micro_batches:
        micro_batch.dispatched = 10 + factor * (micro_batch.dispatched - 10)
        micro_batch.waits = [
            Wait(10 + factor * (w.start - 10), 10 + factor * (w.end - 10), w.reason) for w in micro_batch.waits
        ]
    for request in record.requests:
        request.arrival = 10 + factor * (request.arrival - 10)
        request.token_times = [10 + factor * (t - 10) for t in request.token_times]
    return record


@pytest.fixture
def groups(tmp_path: Path) -> list[RunGroup]:
    """Two settings: the first has one run; the second has three, which take 2, 4 and 3 times as long."""
    folders = []
    for place, (chunk, factor) in enumerate([(256, 1.0), (128, 2.0), (128, 4.0), (128, 3.0)]):
        path = tmp_path / f"run{place}"
        write_run(path, slower(one_stage(), factor), config(chunk=chunk, note="</script>&"))
        folders.append(read_run_folder(path))
    return group_runs(folders)


def test_a_comparison(groups: list[RunGroup], tmp_path: Path):
    comparison, difference = write_comparison(tmp_path / "out", groups)
    assert difference is not None
    assert comparison["difference"] == difference.numbers()
    assert comparison == json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert comparison["ranking"] == ["sarathi chunk=256", "sarathi chunk=128"]
    first, second = comparison["candidates"]
    assert (first["settings"], second["settings"]) == ({"scheduler.chunk": 256}, {"scheduler.chunk": 128})
    assert second["median_run"].endswith("run3")
    duration = second["metrics"]["duration"]
    assert (duration["min"], duration["median"], duration["max"]) == pytest.approx((13.0, 19.5, 26.0))
    assert duration["ratio"] == pytest.approx(3.0)
    assert second["metrics"]["bubble_seconds.control"]["ratio"] == pytest.approx(3.0)
    assert first["metrics"]["duration"]["ratio"] == 1.0
    with (tmp_path / "out" / "comparison.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["label"], row["runs"], row["scheduler.chunk"]) for row in rows] == [
        ("sarathi chunk=256", "1", "256"),
        ("sarathi chunk=128", "3", "128"),
    ]
    assert float(rows[1]["duration_max"]) == pytest.approx(26.0)
    figures = {file.stem for file in (tmp_path / "out" / "figures").iterdir()}
    assert {"bubble_time_per_request", "requests_completed", "bubbles_by_cause", "itl", "timeline"} <= figures


class Reader(HTMLParser):
    """Checks that tags close in order, and collects scripts by id."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.scripts: dict[str, str] = {}
        self._id = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._id = dict(attrs).get("id") or ""
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        self._id = ""

    def handle_data(self, data: str) -> None:
        if self._id:
            self.scripts[self._id] = self.scripts.get(self._id, "") + data


def test_the_page_has_all_pipelines_on_one_axis(groups: list[RunGroup], tmp_path: Path):
    write_comparison(tmp_path, groups, figures=False, title="<two> settings")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    assert not re.search(r"https?:|@import|url\(|\{\{", page)
    assert "&lt;two&gt; settings" in page
    assert not (tmp_path / "figures").exists()
    head = json.loads(reader.scripts["head"])
    assert [run["label"] for run in head["runs"]] == ["sarathi chunk=256", "sarathi chunk=128"]
    assert head["span"] * head["tick"] == pytest.approx(18.0)  # of the median run, three times as slow as the first
    for place in range(2):
        assert zlib.decompress(base64.b64decode(reader.scripts[f"columns{place}"]))


def test_of_many_the_best_are_drawn(tmp_path: Path):
    folders = []
    for place in range(10):
        path = tmp_path / f"run{place}"
        write_run(path, slower(one_stage(), 1.0 + place), config(chunk=16 * (place + 1)))
        folders.append(read_run_folder(path))
    comparison, difference = write_comparison(tmp_path, group_runs(folders[::-1]), figures=False)
    assert difference is None
    assert "difference" not in comparison
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    reader = Reader()
    reader.feed(page)
    shown = [run["label"] for run in json.loads(reader.scripts["head"])["runs"]]
    assert sorted(shown) == sorted(f"sarathi chunk={16 * (n + 1)}" for n in range(8))
    assert "1. sarathi chunk=16<" in page
    assert "10. sarathi chunk=160<" in page


def test_a_damaged_run_is_named(groups: list[RunGroup], tmp_path: Path):
    (groups[0].runs[0].path / "spans.csv.gz").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"run0.spans\.csv\.gz: damaged"):
        write_comparison(tmp_path / "out", groups)


def printed(groups: list[RunGroup], width: int, sort: str = "output_throughput") -> str:
    console = Console(width=width, record=True, force_terminal=False, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(comparison_table(groups, sort=sort))
    return console.export_text()


def row_of(text: str, name: str) -> list[str]:
    (line,) = (line for line in text.splitlines() if line.strip().startswith(name))
    return line.removeprefix(" ").removeprefix(name).split()


def test_the_terminal_has_a_column_each(groups: list[RunGroup]):
    text = printed(groups, 110)
    assert "2 settings, 4 runs: median ± largest deviation" in text
    assert row_of(text, "duration") == ["6.50", "s", "19.50", "s", "±33%"]
    assert row_of(text, "speed-up") == ["1.00x", "0.33x"]
    assert row_of(text, "cv of stage time") == ["0.35", "0.35"]
    assert not any(line.strip().startswith("PB1") for line in text.splitlines())  # nobody had such a bubble


@pytest.mark.parametrize("count", [5, 8])
def test_columns_that_do_not_fit_move_below(count: int):
    wide = [run_group(f"policy_{n} depth={n}", chunk=n, output_throughput=1000.0 * n) for n in range(1, count + 1)]
    for width in (40, 80, 120):
        text = printed(wide, width)
        assert max(len(line.rstrip()) for line in text.splitlines()) <= width
        speeds = [f"{1000 * n:,}" for n in range(1, count + 1)]
        assert [word for word in text.split() if word in speeds] == speeds


def test_many_are_a_ranking():
    many = [run_group(f"chunk={n}", chunk=n, output_throughput=n, p99_itl_ms=100.0 - n) for n in range(10, 30)]
    text = printed(many, 100)
    lines = [line.split() for line in text.splitlines() if line.strip()[:1].isdigit() and "chunk=" in line]
    assert [line[1] for line in lines] == [f"chunk={n}" for n in range(29, 9, -1)]
    assert lines[0][:3] == ["1", "chunk=29", "2.90x"]
    text = printed(many, 60, sort="preemptions")
    assert "ranked by preemptions, lowest first; speed-up over" in text
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 60


def test_constants_fitted_anew_are_one_word_of_a_label():
    def fitted(value: float, chunk: int) -> RunFolder:
        costs = {"gemm": {"knee": value, "wave_us": value, "split_us": value}, "multiprocessors": 108}
        return RunFolder(Path(), {"config": config(chunk=chunk, hardware={"name": "a100-80g", "costs": costs})})

    groups = group_runs([fitted(value, chunk) for value in (1.0, 2.0) for chunk in (64, 128)])
    assert [group.label for group in groups] == [
        "chunk=64 costs=1",
        "chunk=128 costs=1",
        "chunk=64 costs=2",
        "chunk=128 costs=2",
    ]
