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
from .run_folder import replica_folder, title_of, write_run_data, write_summary


def write_fleet_data(
    path: Path,
    fleet: Fleet,
    *,
    config: Mapping[str, Any],
    versions: Mapping[str, str] | None = None,
    slo: SloConfig | None = None,
) -> dict[str, Any]:
    """Write `replica_0/` and on, each a run folder, and of them all summary.json and requests.csv into `path` (made if
    need be); return what summary.json holds.
    """
    fleet.check()
    title = title_of(config)
    for number, (record, ledger) in enumerate(zip(fleet.records, fleet.ledgers, strict=True)):
        write_run_data(
            path / replica_folder(number), record, config=config, versions=versions, title=f"{title}, replica {number}",
            slo=slo, ledger=ledger,
        )  # fmt: skip
    summary = write_summary(
        path, f"{title}, {len(fleet.records)} replicas", fleet.summarize(slo), config=config, versions=versions, slo=slo
    )
    _write_requests(path / "requests.csv", fleet)
    return summary


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
