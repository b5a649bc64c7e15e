"""`spans.csv.gz`: a row for each micro-batch on each stage."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from operator import attrgetter

import numpy as np

from ..core.messages import Span
from ..core.micro_batch_columns import values_at
from ..core.run_record import RunRecord
from ..ledger.causes import CAUSES
from ..ledger.ledger import Ledger
from .text_columns import csv_rows, decimals, integers, nanoseconds, text_by_code

SPAN_COLUMNS = (
    *("step", "stage", "ready", "input", "begin", "end", "sent", "dispatched"),  # seconds from the run's start
    *("prefill_tokens", "decode_tokens", "decode_context", "chunk_prefix"),  # chunk_prefix: summed over the chunks
    *("idle_before_ms", "idle_cause"),  # the cause of the largest part
    "predicted_ms",  # end - begin as the scheduler predicted it; empty where it did not
)
_ROWS_AT_ONCE = 1 << 16


def span_rows(record: RunRecord, ledger: Ledger) -> Iterator[bytes]:
    """Header and rows, by micro-batch, then by stage, in pieces of many rows."""
    yield ",".join(SPAN_COLUMNS).encode() + b"\n"
    spans, micro_batches = record.spans, ledger.micro_batches
    stage, micro_batch = (np.array(list(map(attrgetter(name), spans)), np.int64) for name in ("stage", "micro_batch"))
    order = np.lexsort((stage, micro_batch))
    stage, micro_batch = stage[order], micro_batch[order]
    times = [np.array(list(map(attrgetter(name), spans)), np.float64)[order] for name in SPAN_COLUMNS[2:7]]

    place = micro_batches.places(micro_batch)  # -1 of a micro-batch without a record: no prediction, the last row
    unknown = [np.nan] * record.num_stages
    predictions = np.array([m.predicted or unknown for m in record.micro_batches] + [unknown], np.float64)

    gaps = [ledger.gaps(number) for number in range(ledger.num_stages)]
    idle, cause = (np.concatenate([gap[i] for gap in gaps]) for i in range(2))  # by stage, then by time
    lane = np.repeat(np.arange(ledger.num_stages), [len(lane.micro_batch) for lane in ledger.lanes])
    by_span = np.lexsort((lane, np.concatenate([lane.micro_batch for lane in ledger.lanes])))
    idle, cause = idle[by_span], cause[by_span]

    counts = micro_batches.prefill, micro_batches.decodes, micro_batches.context, micro_batches.chunk_prefix
    for first in range(0, len(micro_batch), _ROWS_AT_ONCE):
        rows = slice(first, first + _ROWS_AT_ONCE)
        at = place[rows]
        known, predicted = at >= 0, predictions[at, stage[rows]]
        said = known & (values_at(micro_batches.tokens, at) > 0) if "tokens" in record.unknown else known
        yield csv_rows(
            [
                integers(micro_batch[rows]),
                integers(stage[rows]),
                *(decimals(nanoseconds(time[rows] - ledger.t0), 9) for time in times),
                decimals(nanoseconds(values_at(micro_batches.dispatched, at) - ledger.t0), 9, known),
                *(
                    integers(values_at(count, at), said & (name != "decode_context" or "context" not in record.unknown))
                    for name, count in zip(SPAN_COLUMNS[8:12], counts, strict=True)
                ),
                decimals(nanoseconds(idle[rows]), 6),
                text_by_code(cause[rows], CAUSES),
                decimals(nanoseconds(np.nan_to_num(predicted)), 6, np.isfinite(predicted)),
            ]
        )


def read_spans(text: Iterable[str]) -> list[Span]:
    """The spans in the lines of a file; other columns are ignored, and columns may stand in any order."""
    rows = csv.reader(text)
    at = {name: i for i, name in enumerate(next(rows, []))}
    micro_batch, stage, *times = (at[name] for name in SPAN_COLUMNS[:7])
    ready, arrived, begin, end, sent = times
    return [
        Span(
            int(row[micro_batch]), int(row[stage]),
            float(row[ready]), float(row[arrived]), float(row[begin]), float(row[end]), float(row[sent]),
        )
        for row in rows
    ]  # fmt: skip
