"""Writes whole run folders: the data, as the room `run_folder` writes it, and the page, `report.html`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...conf.workloads import SloConfig
from ..core.garbage_collection import without_collector
from ..core.run_record import RunRecord
from ..ledger.fleet import Fleet
from ..ledger.ledger import Ledger
from ..run_folder.read import RunFolder
from ..run_folder.write import write_fleet_data, write_run_data
from .chart_data import chart_data
from .comparison_page import charts_of_drawn, read_drawn_runs, render_comparison
from .metrics import THROUGHPUT
from .png import write_figures
from .run_charts import batch_composition
from .run_groups import RunGroup
from .run_page import render_report
from .timeline_png import write_timeline


@without_collector()
def write_run_folder(
    path: Path,
    record: RunRecord,
    *,
    config: Mapping[str, Any],
    versions: Mapping[str, str] | None = None,
    title: str | None = None,
    slo: SloConfig | None = None,
    ledger: Ledger | None = None,
) -> dict[str, Any]:
    """Write a run's data and its report.html into the folder `path`; returns what summary.json holds.

    `write_run_data` says what the arguments are.
    """
    ledger = ledger or Ledger(record)
    summary = write_run_data(path, record, config=config, versions=versions, title=title, slo=slo, ledger=ledger)
    _write_page(path, record, ledger, summary)
    return summary


def write_fleet_folder(
    path: Path,
    fleet: Fleet,
    *,
    config: Mapping[str, Any],
    versions: Mapping[str, str] | None = None,
    slo: SloConfig | None = None,
) -> dict[str, Any]:
    """Write a fleet's data, a report.html for each replica, and one that compares the replicas; returns the summary.

    `write_fleet_data` says what the arguments are.
    """
    summary = write_fleet_data(path, fleet, config=config, versions=versions, slo=slo)
    folder = RunFolder(path, summary)
    for replica, record, ledger in zip(folder.replicas, fleet.records, fleet.ledgers, strict=True):
        _write_page(replica.path, record, ledger, replica.summary)
    write_fleet_report(path, folder, figures=False)
    return summary


def _write_page(path: Path, record: RunRecord, ledger: Ledger, summary: Mapping[str, Any]) -> None:
    page = render_report(record, ledger, summary, chart_data(record, ledger))
    (path / "report.html").write_text(page, encoding="utf-8")


def write_fleet_report(path: Path, folder: RunFolder, *, figures: bool) -> None:
    """Write the report of a fleet, its replicas side by side, into `path`.

    Args:
        path: Where the report goes.
        folder: The fleet's run folder.
        figures: Whether PNGs are written too.
    """
    groups = [RunGroup(f"replica {number}", [replica]) for number, replica in enumerate(folder.replicas)]
    drawn = read_drawn_runs(groups, THROUGHPUT.key)
    page = render_comparison(groups, drawn, folder.title, THROUGHPUT.key, compared="replica")
    (path / "report.html").write_text(page, encoding="utf-8")
    if figures:
        write_figures(path / "figures", [*charts_of_drawn(drawn), *batch_composition(drawn.runs)])
        write_timeline(path / "figures" / "timeline.png", drawn.windows)
