"""The folder that a fleet leaves: a whole run folder for each replica, and what sums them up."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...conf.workloads import SloConfig
from ..core.request_record import RequestRecord
from ..ledger.fleet import Fleet
from ..ledger.summary import request_row
from ..run_folder.run_folder import RunFolder, replica_folder, title_of, write_run_folder, write_summary
from .candidates import Candidate
from .compare_page import charts_of_drawn, draw_runs, render_comparison
from .metrics import THROUGHPUT
from .png import write_figures
from .run_charts import batch_composition
from .timeline_png import write_timeline


def write_fleet_folder(
    path: Path,
    fleet: Fleet,
    *,
    config: Mapping[str, Any],
    versions: Mapping[str, str] | None = None,
    slo: SloConfig | None = None,
) -> dict[str, Any]:
    """Write `replica_0/` and on, each a run folder, and of them all summary.json, requests.csv and report.html (the
    replicas side by side) into `path` (made if need be); return what summary.json holds.
    """
    fleet.check()
    title = title_of(config)
    for number, (record, ledger) in enumerate(zip(fleet.records, fleet.ledgers, strict=True)):
        write_run_folder(
            path / replica_folder(number), record, config=config, versions=versions, title=f"{title}, replica {number}",
            slo=slo, ledger=ledger,
        )  # fmt: skip
    summary = write_summary(
        path, f"{title}, {len(fleet.records)} replicas", fleet.summarize(slo), config=config, versions=versions, slo=slo
    )
    _write_requests(path / "requests.csv", fleet)
    write_fleet_report(path, RunFolder(path, summary), figures=False)
    return summary


def write_fleet_report(path: Path, folder: RunFolder, *, figures: bool) -> None:
    """A fleet's report into `path`: its replicas side by side."""
    candidates = [Candidate(f"replica {number}", [replica]) for number, replica in enumerate(folder.replicas)]
    drawn = draw_runs(candidates, THROUGHPUT.key)
    page = render_comparison(candidates, drawn, folder.title, THROUGHPUT.key, of="replica")
    (path / "report.html").write_text(page, encoding="utf-8")
    if figures:
        write_figures(path / "figures", [*charts_of_drawn(drawn), *batch_composition(drawn.runs)])
        write_timeline(path / "figures" / "timeline.png", drawn.stretches)


def _write_requests(path: Path, fleet: Fleet) -> None:
    """A row a request, in the order of their numbers; `arrival_s` is from the fleet's start."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*request_row(RequestRecord(0, 0, 0.0), fleet.ledgers[0]), "replica"])
        rows = []
        for number, (record, ledger, start) in enumerate(zip(fleet.records, fleet.ledgers, fleet.starts, strict=True)):
            for request in record.requests:
                row = request_row(request, ledger)
                row["arrival_s"] = round(request.arrival - ledger.t0 + start, 6)
                rows.append((request.request, [*row.values(), number]))
        writer.writerows(row for _, row in sorted(rows, key=lambda entry: entry[0]))
