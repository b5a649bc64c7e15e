"""Writes the data of a run folder, and a fleet's totals: tables, record, summary and trace, but no report page."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ...core.garbage_collection import without_collector
from ...core.run_record import RunRecord
from ...core.whole_file import write_text
from ..ledger.blame import Blame
from ..ledger.fleet import Fleet
from ..ledger.ledger import Ledger
from .chrome_trace import write_trace
from .files import RECORD, REQUESTS, SPANS, STAGE_TIMES, SUMMARY, TRACE, batches, gzip_file
from .record_jsonl import record_lines
from .requests_csv import fleet_request_rows, request_rows, write_requests
from .spans_csv import span_rows
from .stage_times_json import stage_times_text

_LINES_AT_ONCE = 20_000


@without_collector()
def write_run_data(path: Path, summary: Mapping[str, Any], record: RunRecord, ledger: Ledger, blame: Blame) -> None:
    """Write a run's files into `path`, created if missing. The ledger's conservation of time is checked first.

    Files: requests.csv, spans.csv.gz, record.jsonl.gz (the rest of the record: micro-batches with their waits, token
    times), summary.json, trace.json.gz, and stage_times.json if the scheduler learned stage times.
    """
    ledger.check()
    write_summary(path, summary)
    write_requests(path / REQUESTS, *request_rows(record, ledger, blame))
    with gzip_file(path / SPANS) as stream:
        for rows in span_rows(record, ledger):
            stream.write(rows)
    encode = msgspec.json.Encoder().encode_lines
    with gzip_file(path / RECORD) as stream:
        for lines in batches(record_lines(record, ledger.t0), _LINES_AT_ONCE):
            stream.write(encode(lines))
    if record.stage_weights is not None:
        write_text(path / STAGE_TIMES, stage_times_text(record.stage_weights))
    write_trace(path / TRACE, record, ledger, title=str(summary["title"]))


def write_fleet_totals(path: Path, summary: Mapping[str, Any], fleet: Fleet) -> None:
    """Write summary.json and requests.csv over all replicas into `path`, created if missing.

    `write_run_data` writes each replica into `replica_folder` of `path`.
    """
    fleet.check()
    write_summary(path, summary)
    write_requests(path / REQUESTS, *fleet_request_rows(fleet))


def write_summary(path: Path, summary: Mapping[str, Any]) -> None:
    """Write `summary.json` into `path`, created if missing."""
    path.mkdir(parents=True, exist_ok=True)
    write_text(path / SUMMARY, json.dumps(summary, indent=2) + "\n")
