"""Replicas taken together: their summary, their folder, and how comparisons see them."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from gapless.conf.workloads import SloConfig
from gapless.runtime.analysis.drawing.chart_data import fleet_chart_data
from gapless.runtime.analysis.explain.analysed_run import AnalysedRun
from gapless.runtime.analysis.ledger.causes import Cause
from gapless.runtime.analysis.ledger.fleet import Fleet
from gapless.runtime.analysis.ledger.ledger import Ledger, inner_bubble_fraction
from gapless.runtime.analysis.ledger.summary import summarize
from gapless.runtime.analysis.report.idle_table import bubble_table
from gapless.runtime.analysis.report.run_groups import group_runs
from gapless.runtime.analysis.report.write_comparison import write_comparison
from gapless.runtime.analysis.report.write_folder import write_report
from gapless.runtime.analysis.run_folder.read import is_run_folder, load_fleet, read_run_folder
from gapless.runtime.core.run_record import RunRecord
from tests.support.simulated_parts import items, make_replica, run
from tests.support.written_runs import write_run

SLO = SloConfig(ttft_ms=20.0)
COMING = items(*[(10 + 7 * n % 50, 4 + n % 9, 0.05 * n) for n in range(20)])
CONFIG = {"model": {"name": "tiny"}, "scheduler": {"name": "sarathi"}, "simulation": {"replicas": 3}}


def records(count: int, layers: tuple[int, ...] = (2, 2)) -> list[RunRecord]:
    fleet = [make_replica(layers=layers) for _ in range(count)]
    run(fleet, COMING)
    return [replica.record for replica in fleet]


def approx(summary: dict[str, Any]) -> dict[str, Any]:
    """Numbers within a nanosecond, also those of lists and of mappings inside."""
    return {
        key: pytest.approx(value, rel=1e-6, abs=1e-9) if key != "notes" and value is not None else value
        for key, value in summary.items()
    }


def test_a_run_alone_is_a_fleet_of_one() -> None:
    (record,) = records(1)
    fleet, ledger = Fleet([record]), Ledger(record)
    assert summarize(fleet, SLO) == approx(summarize(Fleet([record], ledgers=[ledger]), SLO))
    gaps = [np.diff(request.token_times) for request in record.requests]
    assert fleet_chart_data(fleet).latencies["itl"] == pytest.approx(np.concatenate(gaps))
    assert (fleet.num_stages, fleet.stage_name(1), fleet.stage_seconds) == (2, "stage 1", ledger.stage_seconds)


def test_what_replicas_come_to_together() -> None:
    fleet = Fleet(records(3))
    fleet.check()
    own = [
        summarize(Fleet([record], ledgers=[ledger]), SLO)
        for record, ledger in zip(fleet.records, fleet.ledgers, strict=True)
    ]
    whole = summarize(fleet, SLO)
    assert fleet.starts == pytest.approx([0.0, 0.05, 0.1])
    assert whole["duration"] == pytest.approx(max(s + o["duration"] for s, o in zip(fleet.starts, own, strict=True)))
    for key in ("completed", "failed", "total_input_tokens", "total_output_tokens", "micro_batches", "preemptions"):
        assert whole[key] == sum(each[key] for each in own)
    assert whole["output_throughput"] == pytest.approx(whole["total_output_tokens"] / whole["duration"])
    good = sum(each["request_goodput"] * each["duration"] for each in own)
    assert 0 < good < 20
    assert whole["request_goodput"] * whole["duration"] == pytest.approx(good)
    assert (whole["replicas"], whole["requests_per_replica"]) == (3, [7, 7, 6])
    assert len(whole["stage_busy_fraction"]) == 6
    busy = sum(whole["stage_busy_fraction"]) * fleet.span_seconds
    assert busy + sum(whole["bubble_seconds"].values()) == pytest.approx(6 * fleet.span_seconds)
    assert whole["bubble_fraction_inner"] == pytest.approx(
        inner_bubble_fraction(fleet.seconds_by_cause(), fleet.stage_seconds)
    )
    first = [r.token_times[0] - r.arrival for record in fleet.records for r in record.requests]
    assert whole["p99_ttft_ms"] == pytest.approx(1e3 * np.percentile(first, 99))


def test_their_chart_data_is_of_all() -> None:
    fleet = Fleet(records(3))
    run_ = fleet_chart_data(fleet)
    ends = sorted(r.token_times[-1] for record in fleet.records for r in record.requests)
    assert run_.finished.tolist() == pytest.approx(ends)
    assert (np.diff(run_.dispatched) >= 0).all()
    assert run_.num_stages == 6
    assert run_.prefill_tokens.sum() == sum(len(item.prompt) for item in COMING)
    for stage in range(6):
        assert fleet.busy_seconds(stage) + sum(run_.by_cause[stage].values()) == pytest.approx(run_.span)
        assert run_.by_cause[stage] == pytest.approx(fleet.seconds_by_cause(stage))


def test_a_replica_without_requests_is_idle_all_along() -> None:
    fleet = [make_replica() for _ in range(3)]
    run(fleet, COMING[:2])
    idle = Fleet([replica.record for replica in fleet])
    idle.check()
    assert summarize(idle)["requests_per_replica"] == [1, 1, 0]
    assert idle.seconds_by_cause(5)[Cause.FILL_DRAIN] == idle.span_seconds


def test_the_folder_holds_whole_runs_and_is_read_back(tmp_path: Path) -> None:
    fleet = Fleet(records(3))
    summary = write_run(tmp_path / "fleet", fleet, CONFIG, slo=SLO).summary
    assert json.loads((tmp_path / "fleet" / "summary.json").read_text(encoding="utf-8")) == summary
    assert is_run_folder(tmp_path / "fleet")
    folder = read_run_folder(tmp_path / "fleet")
    assert [replica.path.name for replica in folder.replicas] == ["replica_0", "replica_1", "replica_2"]
    assert all(is_run_folder(replica.path) for replica in folder.replicas)
    again = load_fleet(folder)
    assert summarize(again, SLO) == approx({key: summary[key] for key in summarize(again, SLO)})
    page = (tmp_path / "fleet" / "report.html").read_text(encoding="utf-8")
    assert "replica 2" in page
    with (tmp_path / "fleet" / "requests.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["request"]) for row in rows] == list(range(20))
    assert [int(row["replica"]) for row in rows[:4]] == [0, 1, 2, 0]
    assert [float(row["arrival_s"]) for row in rows] == pytest.approx([item.arrival for item in COMING])


def test_a_report_of_a_folder_keeps_its_date_versions_and_error(tmp_path: Path) -> None:
    error = {
        "low": -0.05,
        "high": 0.22,
        "source": "whole steps that were not fitted, LLaMA 2 70B at TP 4 and BLOOM-176B at TP 8",
    }
    folder = write_run(tmp_path, Fleet(records(3)), CONFIG, versions={"numpy": "9.8.7"}, cost_error=error)
    for file in [tmp_path / "summary.json", *tmp_path.glob("replica_*/summary.json")]:
        summary = json.loads(file.read_text(encoding="utf-8"))
        file.write_text(json.dumps(summary | {"date": "2001-02-03 04:05:06 UTC"}), encoding="utf-8")
    run = AnalysedRun.read(read_run_folder(folder.path))
    assert all(replica.summary["cost_error"] == error for replica in run.replicas)
    write_report(tmp_path, run)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "2001-02-03 04:05:06 UTC" in page
    assert "9.8.7" in page


def test_a_comparison_sees_a_fleet_as_one(tmp_path: Path) -> None:
    write_run(tmp_path / "fleet", Fleet(records(3)), CONFIG)
    (record,) = records(1)
    write_run(tmp_path / "one", record, CONFIG | {"simulation": {"replicas": 1}})
    candidates = group_runs([read_run_folder(tmp_path / name) for name in ("one", "fleet")])
    assert [candidate.label for candidate in candidates] == ["replicas=1", "replicas=3"]
    comparison, _ = write_comparison(tmp_path, candidates, figures=False)
    assert [row["metrics"]["completed"]["median"] for row in comparison["candidates"]] == [20, 20]
    assert "replica 0 of 3" in (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("width", "heads"),
    [
        (230, [f"{replica}: stage {stage}" for replica in range(3) for stage in range(4)]),
        (120, ["0: stage 0", "busiest", "idlest", "2: stage 3"]),
        (90, ["0: stage 0", "busiest", "2: stage 3"]),  # three have room
        (70, ["busiest"]),
        (56, []),
    ],
)
def test_a_table_of_many_stages_fits_the_console(width: int, heads: list[str]) -> None:
    fleet = Fleet(records(3, layers=(1, 3, 1, 1)))
    console = Console(width=width, record=True, force_terminal=False, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(bubble_table(fleet))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    for head in heads:
        assert head in text
    assert "│ idle " in text
