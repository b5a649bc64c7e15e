"""`requests.csv`: a row for each request."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from ..core.request_record import RequestRecord
from ..core.run_record import RunRecord
from ..ledger.fleet import Fleet
from ..ledger.latencies import time_to_first_token, tokens_apart
from ..ledger.ledger import Ledger


def request_row(request: RequestRecord, ledger: Ledger) -> dict[str, Any]:
    """A row by column: times in ms, `arrival_s` in seconds from the run's start, None where not reached."""
    gaps = tokens_apart(request) * 1e3
    ttft = time_to_first_token(request)
    return {
        "request": request.request,
        "prompt_tokens": request.prompt_tokens,
        "output_tokens": request.output_tokens,
        "arrival_s": round(request.arrival - ledger.t0, 6),
        "ttft_ms": None if ttft is None else round(ttft * 1e3, 3),
        "mean_tbt_ms": round(float(gaps.mean()), 3) if len(gaps) else None,
        "max_tbt_ms": round(float(gaps.max()), 3) if len(gaps) else None,
        "e2el_ms": round((request.token_times[-1] - request.arrival) * 1e3, 3) if request.token_times else None,
        "bubble_ms": round(ledger.bubble_of_request(request.request) * 1e3, 3),
        "preemptions": request.preemptions,
        "cached_tokens": request.cached_tokens,
        "finish_reason": request.finish_reason,
    }


def write_requests(path: Path, record: RunRecord, ledger: Ledger) -> None:
    """Write a run's requests, in the order of the record."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(_header(ledger))
        writer.writerows(request_row(request, ledger).values() for request in record.requests)


def write_fleet_requests(path: Path, fleet: Fleet) -> None:
    """Write the requests of all replicas, in the order of their numbers; `arrival_s` is from the fleet's start."""
    rows = []
    for number, (record, ledger, start) in enumerate(zip(fleet.records, fleet.ledgers, fleet.starts, strict=True)):
        for request in record.requests:
            row = request_row(request, ledger)
            row["arrival_s"] = round(request.arrival - ledger.t0 + start, 6)
            rows.append((request.request, [*row.values(), number]))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*_header(fleet.ledgers[0]), "replica"])
        writer.writerows(row for _, row in sorted(rows, key=lambda entry: entry[0]))


def _header(ledger: Ledger) -> list[str]:
    return list(request_row(RequestRecord(0, 0, 0.0), ledger))
