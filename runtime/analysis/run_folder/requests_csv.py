"""`requests.csv`: one row per request."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...core.latencies import time_to_first_token, tokens_apart
from ...core.request_record import RequestRecord
from ...core.run_record import RunRecord
from ...core.whole_file import whole_file
from ..ledger.blame import Blame
from ..ledger.fleet import Fleet
from ..ledger.ledger import Ledger


def request_row(request: RequestRecord, origin: float, bubble: float) -> dict[str, Any]:
    """Return a row by column: times in ms, `arrival_s` in seconds from `origin`, None if not reached.

    Args:
        request: the request's record.
        origin: the run's start, in seconds on the clock of the request's times.
        bubble: bubble time of the request, in seconds.
    """
    gaps = tokens_apart(request) * 1e3
    ttft = time_to_first_token(request)
    return {
        "request": request.request,
        "prompt_tokens": request.prompt_tokens,
        "output_tokens": request.output_tokens,
        "arrival_s": round(request.arrival - origin, 6),
        "ttft_ms": None if ttft is None else round(ttft * 1e3, 3),
        "mean_tbt_ms": round(float(gaps.mean()), 3) if len(gaps) else None,
        "max_tbt_ms": round(float(gaps.max()), 3) if len(gaps) else None,
        "e2el_ms": round((request.token_times[-1] - request.arrival) * 1e3, 3) if request.token_times else None,
        "bubble_ms": round(bubble * 1e3, 3),
        "preemptions": request.preemptions,
        "cached_tokens": request.cached_tokens,
        "finish_reason": request.finish_reason,
        "user": request.user,
    }


def request_rows(record: RunRecord, ledger: Ledger, blame: Blame) -> tuple[list[str], list[list[Any]]]:
    """Return the columns of a run's requests, and their rows, in the order of the record.

    They include the TTFT and TBT that each request cost others.
    """
    costs = [np.round(1e3 * charges.cost, 3).tolist() for charges in (blame.ttft, blame.tbt)]
    rows = [
        [*_row_of(request, ledger, ledger.t0), *cost] for request, *cost in zip(record.requests, *costs, strict=True)
    ]
    return [*_HEADER, "cost_others_ttft_ms", "cost_others_tbt_ms"], rows


def fleet_request_rows(fleet: Fleet) -> tuple[list[str], list[list[Any]]]:
    """Return the columns and rows of all replicas' requests, by number; `arrival_s` is from the fleet's start.

    With a prefill pool, `replica` is the prefill replica, and the times are over both pools.
    """
    rows: list[list[Any]] = []
    for number, (record, ledger, start) in enumerate(zip(fleet.records, fleet.ledgers, fleet.starts, strict=True)):
        if not fleet.num_prefill:
            rows += [[*_row_of(request, ledger, ledger.t0 - start), number] for request in record.requests]
    for each in fleet.joined:
        times = [None if seconds is None else round(seconds * 1e3, 3) for seconds in (each.kv_wait, each.kv_transfer)]
        rows.append([*request_row(each.record, 0.0, each.bubble).values(), each.prefill, each.decode, *times])
    rows.sort(key=lambda row: row[0])
    of_pools = ("decode_replica", "kv_wait_ms", "kv_transfer_ms") if fleet.num_prefill else ()
    return [*_HEADER, "replica", *of_pools], rows


def write_requests(path: Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write the result of `request_rows` or `fleet_request_rows`."""
    with whole_file(path) as part, part.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)


def _row_of(request: RequestRecord, ledger: Ledger, origin: float) -> list[Any]:
    return list(request_row(request, origin, ledger.bubble_of_request(request.request)).values())


_HEADER = list(request_row(RequestRecord(0, 0, 0.0), 0.0, 0.0))
