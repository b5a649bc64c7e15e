"""Writes the data of a run's folder, and a fleet's totals: tables, record, summary and trace, but no page."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ...conf.workloads import SloConfig
from ..core.garbage_collection import without_collector
from ..core.run_record import RunRecord
from ..ledger.blame import Blame
from ..ledger.fleet import Fleet
from ..ledger.ledger import Ledger
from ..ledger.slo import has_bound
from ..ledger.summary import summarize
from .files import RECORD, REQUESTS, SPANS, STAGE_TIMES, SUMMARY, TRACE
from .gzip_stream import GzipStream
from .record_jsonl import record_lines
from .requests_csv import fleet_request_rows, request_rows, write_requests
from .spans_csv import span_rows
from .stage_times_json import stage_times_text
from .titles import is_simulated, title_of
from .trace import write_trace

T = TypeVar("T")

_LINES_AT_ONCE = 20_000


@without_collector()
def write_run_data(
    path: Path,
    record: RunRecord,
    *,
    config: Mapping[str, Any],
    versions: Mapping[str, str] | None = None,
    title: str | None = None,
    slo: SloConfig | None = None,
    cost_error: Mapping[str, Any] | None = None,
    ledger: Ledger | None = None,
    blame: Blame | None = None,
) -> dict[str, Any]:
    """Write a run's files into `path` (made if need be) and return what `summary.json` holds.

    Files: requests.csv, spans.csv.gz, record.jsonl.gz (the rest of the record: micro-batches with their waits, token
    times), summary.json, trace.json.gz, and stage_times.json where the scheduler learned them.

    Args:
        config: the run's config, by group and key.
        versions: of the packages that ran, by name.
        title: `title_of(config)` by default.
        slo: with bounds, the summary has `request_goodput`.
        cost_error: of a simulation: how far its stage times may be off; the summary has it under this name.
        ledger: the record's, where it has been made. Its conservation of time is checked first.
        blame: the same.
    """
    ledger = ledger or Ledger(record)
    ledger.check()
    title = title or title_of(config)
    numbers = summarize(record, ledger, slo)
    summary = write_summary(path, title, numbers, config=config, versions=versions, slo=slo, cost_error=cost_error)
    write_requests(path / REQUESTS, *request_rows(record, ledger, blame or Blame.of_run(record, ledger)))
    with GzipStream(path / SPANS) as stream:
        for rows in span_rows(record, ledger):
            stream.write(rows)
    encode = msgspec.json.Encoder().encode_lines
    with GzipStream(path / RECORD) as stream:
        for lines in _batches(record_lines(record, ledger.t0)):
            stream.write(encode(lines))
    if record.stage_times is not None:
        (path / STAGE_TIMES).write_text(stage_times_text(record.stage_times), encoding="utf-8")
    write_trace(path / TRACE, record, ledger, title=title)
    return summary


def write_fleet_totals(
    path: Path,
    fleet: Fleet,
    *,
    config: Mapping[str, Any],
    versions: Mapping[str, str] | None = None,
    slo: SloConfig | None = None,
    cost_error: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Write summary.json and requests.csv of all replicas together into `path` and return what summary.json holds.

    The arguments are those of `write_run_data`, which writes each replica into `replica_folder` of `path`.
    """
    title = title_of(config)
    title += "" if is_simulated(config) else f", {len(fleet.records)} replicas"  # a simulation's title names them
    summary = write_summary(
        path, title, fleet.summarize(slo), config=config, versions=versions, slo=slo, cost_error=cost_error
    )
    write_requests(path / REQUESTS, *fleet_request_rows(fleet))
    return summary


def write_summary(
    path: Path,
    title: str,
    numbers: Mapping[str, Any],
    *,
    config: Mapping[str, Any],
    versions: Mapping[str, str] | None = None,
    slo: SloConfig | None = None,
    cost_error: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Write `summary.json` into `path` (made if need be) and return what it holds: `numbers`, and of which run."""
    summary = {
        "title": title,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        **numbers,
        **({"cost_error": dict(cost_error)} if cost_error is not None else {}),
        "config": dict(config) | ({"slo": asdict(slo)} if slo is not None and has_bound(slo) else {}),
        "versions": dict(versions or {}),
    }
    path.mkdir(parents=True, exist_ok=True)
    (path / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return summary


def _batches(items: Iterator[T]) -> Iterator[list[T]]:
    while batch := list(islice(items, _LINES_AT_ONCE)):
        yield batch
