"""`spans.csv.gz`: one row per micro-batch and stage."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np

from ...core.messages import Span
from ...core.micro_batch_columns import Floats, Ints, values_at
from ...core.run_record import RunRecord
from ..ledger.causes import CAUSES
from ..ledger.ledger import Ledger
from .text_columns import csv_rows, decimals, integers, nanoseconds, text_by_code

SPAN_COLUMNS = (
    *("step", "stage", "ready", "input", "begin", "end", "sent", "dispatched"),  # seconds from the run's start
    *("prefill_tokens", "decode_tokens", "decode_context", "chunk_prefix"),  # chunk_prefix: summed over the chunks
    *("idle_before_ms", "idle_cause"),  # the cause with the largest share
    "predicted_ms",  # the scheduler's prediction of end - begin; empty without one
    *("contended_before_ms", "contended_ms"),  # in the CPU run queue: the rank's threads until begin, then its own
    *("expert_load", "hot_layer", "hot_expert"),  # as in a `Span`; empty without experts
)
_CONTENDED = ("contended_before", "contended")  # of a `Span`
_ROUTING = ("expert_load", "hot_layer", "hot_expert")  # of a `Span`
_LATER: dict[str, Callable[[str], Any]] = {  # columns that older run folders lack, in the order of a `Span`
    **dict.fromkeys(("contended_before_ms", "contended_ms"), lambda text: float(text) / 1e3),
    **dict(zip(_ROUTING, (float, int, int), strict=True)),
}
_ROWS_AT_ONCE = 1 << 16


@dataclass(frozen=True, slots=True)
class SpanTable:
    """The spans of a run as arrays, one entry each, by micro-batch, then by stage.

    Attributes:
        micro_batch, stage: Numbers.
        times: For each of `SPAN_COLUMNS[2:7]`, seconds on the record's clock.
        place: Index of the micro-batch in the ledger's columns; -1 without a record.
        idle: Idle seconds right before each.
        cause: The code of the cause with most of these seconds; -1 if there are none.
        predicted: Compute seconds predicted by the scheduler; NaN without a prediction.
        contended: For each of `SPAN_COLUMNS[15:17]`, seconds.
        routing: For each of `SPAN_COLUMNS[17:]`, its value; NaN if there is none.
    """

    micro_batch: Ints
    stage: Ints
    times: list[Floats]
    place: Ints
    idle: Floats
    cause: Ints
    predicted: Floats
    contended: list[Floats]
    routing: list[Floats]


def span_table(record: RunRecord, ledger: Ledger) -> SpanTable:
    """Return a run's sorted spans, with idle times from the ledger and the scheduler's predictions."""
    spans = record.spans
    stage, micro_batch = (np.array(list(map(attrgetter(name), spans)), np.int64) for name in ("stage", "micro_batch"))
    order = np.lexsort((stage, micro_batch))
    stage, micro_batch = stage[order], micro_batch[order]
    times = [np.array(list(map(attrgetter(name), spans)), np.float64)[order] for name in SPAN_COLUMNS[2:7]]

    place = ledger.micro_batches.places(micro_batch)  # without a record, -1 selects the last row: no prediction
    unknown = [np.nan] * record.num_stages
    predictions = np.array([m.predicted or unknown for m in record.micro_batches] + [unknown], np.float64)

    gaps = [ledger.gaps(number) for number in range(ledger.num_stages)]
    idle, cause = (np.concatenate([gap[i] for gap in gaps]) for i in range(2))  # by stage, then by time
    lane = np.repeat(np.arange(ledger.num_stages), [len(lane.micro_batch) for lane in ledger.lanes])
    by_span = np.lexsort((lane, np.concatenate([lane.micro_batch for lane in ledger.lanes])))
    contended, routing = (
        [np.array([getattr(span, name) for span in spans], np.float64)[order] for name in names]
        for names in (_CONTENDED, _ROUTING)
    )
    routing = [np.where(routing[0] > 0, each, np.nan) for each in routing]
    predicted = predictions[place, stage]
    return SpanTable(micro_batch, stage, times, place, idle[by_span], cause[by_span], predicted, contended, routing)


def span_rows(record: RunRecord, ledger: Ledger) -> Iterator[bytes]:
    """Yield the header and rows, by micro-batch, then by stage, in chunks of many rows."""
    yield ",".join(SPAN_COLUMNS).encode() + b"\n"
    spans, micro_batches = span_table(record, ledger), ledger.micro_batches
    counts = micro_batches.prefill, micro_batches.decodes, micro_batches.context, micro_batches.chunk_prefix
    for first in range(0, len(spans.place), _ROWS_AT_ONCE):
        rows = slice(first, first + _ROWS_AT_ONCE)
        at, predicted = spans.place[rows], spans.predicted[rows]
        known = at >= 0
        said = known & (values_at(micro_batches.tokens, at) > 0) if "tokens" in record.unknown else known
        yield csv_rows(
            [
                integers(spans.micro_batch[rows]),
                integers(spans.stage[rows]),
                *(decimals(nanoseconds(time[rows] - ledger.t0), 9) for time in spans.times),
                decimals(nanoseconds(values_at(micro_batches.dispatched, at) - ledger.t0), 9, known),
                *(
                    integers(values_at(count, at), said & (name != "decode_context" or "context" not in record.unknown))
                    for name, count in zip(SPAN_COLUMNS[8:12], counts, strict=True)
                ),
                decimals(nanoseconds(spans.idle[rows]), 6),
                text_by_code(spans.cause[rows], CAUSES),
                decimals(nanoseconds(np.nan_to_num(predicted)), 6, np.isfinite(predicted)),
                *(decimals(nanoseconds(each[rows]), 6) for each in spans.contended),
                *(decimals(nanoseconds(np.nan_to_num(each[rows])), 9, each[rows] > -1) for each in spans.routing),
            ]
        )


def read_spans(text: Iterable[str]) -> list[Span]:
    """Return the spans in the lines of a file; columns may be in any order, and unknown ones are ignored."""
    rows = csv.reader(text)
    at = {name: i for i, name in enumerate(next(rows, []))}
    micro_batch, stage, *times = (at[name] for name in SPAN_COLUMNS[:7])
    ready, arrived, begin, end, sent = times
    later = [(at[name], kind) for name, kind in _LATER.items() if name in at]
    return [
        Span(
            int(row[micro_batch]),
            int(row[stage]),
            float(row[ready]),
            float(row[arrived]),
            float(row[begin]),
            float(row[end]),
            float(row[sent]),
            *(kind(row[place]) for place, kind in later if row[place]),
        )
        for row in rows
    ]
