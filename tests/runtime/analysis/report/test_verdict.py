"""Tests of a comparison's verdict in words, and of the units of its rows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gapless.runtime.analysis.drawing.chart import numbered_points
from gapless.runtime.analysis.report.comparison_charts import TAILS, throughput_against
from gapless.runtime.analysis.report.metrics import metric_of, ratio_text, row_unit
from gapless.runtime.analysis.report.run_groups import RunGroup, group_runs
from gapless.runtime.analysis.report.verdict import verdict
from gapless.runtime.analysis.report.write_comparison import write_comparison
from gapless.runtime.analysis.run_folder.read import read_run_folder
from tests.support.hand_made import config, folder, one_stage, run_group
from tests.support.written_runs import write_run


def repeats(label: str, speeds: list[float], **more: float) -> RunGroup:
    return RunGroup(label, [folder(f"{label}{n}", output_throughput=speed, **more) for n, speed in enumerate(speeds)])


def test_the_fastest_its_ratio_the_baseline_and_the_cost():
    groups = [
        run_group("slow", output_throughput=200.0, p99_itl_ms=40.0, p99_ttft_ms=1000.0),
        run_group("fast", output_throughput=229.6, p99_itl_ms=60.0, p99_ttft_ms=500.0),
    ]
    first, *rest = verdict(groups)
    assert first == "fast is the fastest: 230 output tok/s, 1.15 times the first setting, slow (200)."
    text = " ".join(rest)
    assert "Compared with slow, the p99 TBT is longer (60.0 ms against 40.0 ms, 1.50 times)" in text
    assert "the p99 TTFT is shorter (500 ms against 1.00 s, 0.50 times)" in text
    assert "The shortest p99 TBT with slow (40.0 ms)." in text
    assert "repeats=5" in text


def test_a_first_setting_that_is_the_fastest_is_set_beside_the_next():
    groups = [run_group("a", output_throughput=300.0), run_group("b", output_throughput=150.0)]
    assert verdict(groups)[0] == "a is the fastest: 300 output tok/s, 2.00 times the next, b (150)."


def test_settings_within_the_noise_are_ties():
    groups = [repeats("a", [100, 110, 120]), repeats("b", [105, 115, 125]), repeats("c", [50, 51, 52])]
    first, *rest = verdict(groups)
    assert first == "b and a tie as the fastest: 110 to 115 output tok/s, 2.25 times the next, c (51)."
    assert "ties" in rest[-1]
    assert verdict(groups[:2])[0] == "Both settings tie: 110 to 115 output tok/s."
    apart = [repeats("a", [100, 101, 102]), repeats("b", [105, 115, 125])]
    assert verdict(apart)[0].startswith("b is the fastest: 115 output tok/s, 1.14 times the first setting, a (101)")


def test_without_speeds_there_is_no_verdict():
    assert verdict([run_group("a"), run_group("b")]) == []
    assert verdict([run_group("a", output_throughput=1.0)]) == []


def test_a_row_has_one_unit():
    unit = row_unit(metric_of("p99_ttft_ms"), [900.0, 2500.0])
    assert (unit.name, unit.text(900.0), unit.text(2500.0), unit.text(0.0)) == ("s", "0.90", "2.50", "0")
    unit = row_unit(metric_of("bubble_seconds.control"), [0.5, 0.02])
    assert (unit.name, unit.text(0.5), unit.text(0.02)) == ("stage-ms", "500", "20")
    unit = row_unit(metric_of("bubble_fraction"), [0.123])
    assert (unit.name, unit.text(0.123)) == ("%", "12.3")


@pytest.mark.parametrize(
    ("ratio", "text"), [(1.1478912, "1.15"), (0.5, "0.50"), (12.345, "12.3"), (0.01234, "0.012"), (1234.5, "1,234")]
)
def test_ratios_have_three_digits(ratio: float, text: str):
    assert ratio_text(ratio) == text


def test_the_page_opens_with_the_verdict_and_hides_equal_rows(tmp_path: Path):
    folders = []
    for chunk in (256, 128):
        write_run(tmp_path / str(chunk), one_stage(), config(chunk=chunk))
        folders.append(read_run_folder(tmp_path / str(chunk)))
    folders[1].summary["output_throughput"] *= 2
    write_comparison(tmp_path, group_runs(folders), figures=False)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    order = [page.index(word) for word in ("sarathi chunk=128 is the fastest", 'id="pipeline"', 'class="compared"')]
    assert order == sorted(order)
    (count,) = re.findall(r"show the (\d+) rows equal for all", page)
    assert page.count('<tr class="member equal">') == int(count) > 10
    (row,) = re.findall(r'<tr class="member">(<th>output .*?)</tr>', page)
    assert "2.00x" in row


def test_a_point_has_one_number_in_all_plots_of_a_page():
    groups = [
        run_group(
            f"a policy with a long name {n}", output_throughput=100.0 + n, p99_itl_ms=10.0 * n, p99_ttft_ms=1000.0 - n
        )
        for n in range(1, 7)
    ]
    numbers = [
        {series.name: number for number, series in numbered_points(throughput_against(groups, tail))} for tail in TAILS
    ]
    assert numbers[0] == numbers[1] == {group.label: place for place, group in enumerate(groups, 1)}
