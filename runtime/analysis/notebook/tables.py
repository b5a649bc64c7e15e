"""The tables of a run: one row per micro-batch, span, idle interval or token.

Columns are named as in the run folder's files; columns whose names end in `_ms` are in milliseconds, other times in
seconds.
"""

from __future__ import annotations

import numpy as np

from ...core.micro_batch_columns import values_at
from ...core.run_record import RunRecord
from ..ledger.causes import CAUSES, Cause
from ..ledger.ledger import Ledger
from ..run_folder.spans_csv import SPAN_COLUMNS, span_table
from .table import Column, Table

_CAUSE_NAMES = np.array([*CAUSES, ""], np.str_)  # index -1 gives an empty name


def micro_batches_of(record: RunRecord, ledger: Ledger, start: float) -> Table:
    """Return one row per micro-batch in order of dispatch; times are seconds since `start` on the record's clock."""
    records, columns = record.micro_batches, ledger.micro_batches
    completed = [np.nan if m.completed is None else m.completed for m in records]
    table: dict[str, Column] = {
        "step": columns.micro_batch,
        "dispatched": columns.dispatched - start,
        "completed": np.array(completed, np.float64) - start,
        "chunks": columns.chunks,
        "prefill_tokens": columns.prefill,
        "decode_tokens": columns.decodes,
        "decode_context": columns.context,
        "chunk_prefix": columns.chunk_prefix,
        **dict(zip(("kv_blocks", "running", "waiting"), columns.counters.T, strict=True)),
        "sampled_rows": np.array([m.sampled_rows for m in records], np.int64),
        "draft_tokens": np.array([m.drafts for m in records], np.int64),
        "accepted_tokens": np.array([m.accepted for m in records], np.int64),
        "bubble_ms": 1e3 * np.array([ledger.bubble_of_micro_batch(m.micro_batch) for m in records], np.float64),
    }
    return Table("micro_batches", table)


def spans_of(record: RunRecord, ledger: Ledger, start: float) -> Table:
    """Return one row per micro-batch and stage: the columns of `spans.csv.gz`."""
    spans, columns = span_table(record, ledger), ledger.micro_batches
    known = spans.place >= 0
    counts = columns.prefill, columns.decodes, columns.context, columns.chunk_prefix
    values: list[Column] = [
        spans.micro_batch,
        spans.stage,
        *(times - start for times in spans.times),
        np.where(known, values_at(columns.dispatched, spans.place) - start, np.nan),
        *(values_at(count, spans.place) for count in counts),
        1e3 * spans.idle,
        _CAUSE_NAMES[spans.cause],
        1e3 * spans.predicted,
        *(1e3 * seconds for seconds in spans.contended),
        *spans.routing,
    ]
    return Table("spans", dict(zip(SPAN_COLUMNS, values, strict=True)))


def idle_of(record: RunRecord, ledger: Ledger, start: float, end: float) -> Table:
    """Return one row per idle interval of each stage between `start` and `end`, by stage.

    Their seconds by cause add up to the summary's.

    `step` is the micro-batch that the stage waited for. It is -1 after the last one, and before a fleet's replica has
    started.
    """
    before, after = (start, ledger.t0), (ledger.t1, end)  # while the fleet runs but this replica does not
    outside = [each for each in (before, after) if each[1] > each[0]]
    tables = []
    for stage, (lane, idle) in enumerate(zip(ledger.lanes, ledger.idle_columns, strict=True)):
        none = np.full(len(outside), -1)
        begin = np.concatenate([idle.start, [each[0] for each in outside]])
        until = np.concatenate([idle.end, [each[1] for each in outside]])
        cause = np.concatenate([idle.cause.astype(np.int64), np.full(len(outside), Cause.FILL_DRAIN.code)])
        step = np.concatenate([np.append(lane.micro_batch, -1)[idle.place], none])
        tables.append((np.full(len(begin), stage), begin - start, until - start, until - begin, cause, step))
    columns = [np.concatenate(parts) for parts in zip(*tables, strict=True)]
    table: dict[str, Column] = dict(zip(("stage", "begin", "end", "seconds", "cause", "step"), columns, strict=True))
    table["cause"] = _CAUSE_NAMES[table["cause"]]
    return Table("idle", table)


def tokens_of(record: RunRecord, start: float) -> Table:
    """Return one row per output token, by request in the order of the record.

    `token` counts from 0; `tbt_ms` is the time since the previous token, NaN for a first token.
    """
    counts = [len(request.token_times) for request in record.requests]
    times = np.array([time for request in record.requests for time in request.token_times], np.float64)
    first = np.cumsum([0, *counts[:-1]]) if counts else np.zeros(0, np.int64)
    token = np.arange(len(times)) - np.repeat(first, counts)
    table: dict[str, Column] = {
        "request": np.repeat(np.array([request.request for request in record.requests], np.int64), counts),
        "token": token,
        "time": times - start,
        "tbt_ms": np.where(token > 0, 1e3 * np.diff(times, prepend=0.0), np.nan),
    }
    return Table("tokens", table)
