"""Merges the traces of a pipeline's ranks into one `RunRecord`."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ....conf.errors import ConfigError
from ...core.messages import Span
from ...core.run_record import DecodesRecord, MicroBatchRecord, RunRecord, SegmentRecord, Unknown, Wait
from .common_clock import align_clocks
from .matching import MatchedTransfer, match_transfers, shift_between
from .rank_trace import Engine, RankTrace, Step, Transfer
from .scheduler_view import depth_of, waits_of_first_stage
from .stage_spans import StageSpan, stage_spans

NOBODY = -1  # request number if the trace does not identify the request


@dataclass(slots=True)
class ImportedRun:
    """A run that was read from traces.

    `transfers` are the matched sends and receives into each stage after the first, by stage.
    """

    record: RunRecord
    engine: Engine
    transfers: dict[int, list[MatchedTransfer]]


def run_of_traces(traces: Sequence[RankTrace]) -> ImportedRun:
    """Merge a pipeline's ranks into one run. A stage is represented by its first tensor-parallel rank.

    Micro-batches at the edges of the traces that some stage has not recorded are left out.

    Raises:
        ConfigError: no rank, a stage without a rank, a rank without micro-batches, or ranks that share none.
    """
    notes: list[str] = []
    lanes = _one_rank_a_stage(traces, notes)
    notes += align_clocks(lanes)
    spans = [stage_spans(trace) for trace in lanes]
    for trace, own in zip(lanes, spans, strict=True):
        if not own:
            raise ConfigError(f"{trace.name}: rank {trace.rank} has no micro-batch: neither steps nor compute")
    rows = _rows(spans)
    if not rows:
        raise ConfigError(f"{lanes[0].name} and the other ranks' traces have no micro-batch in common")
    left_out = max(len(own) for own in spans) - len(rows)
    if left_out:
        are = "micro-batch is" if left_out == 1 else "micro-batches are"
        notes.append(f"{left_out} {are} left out: not every stage has recorded them.")
    transfers = {
        stage: [pair for row in rows for pair in match_transfers(row[stage - 1], row[stage])]
        for stage in range(1, len(lanes))
    }
    record = RunRecord(len(lanes), 0, notes=[*_notes(lanes, rows, transfers), *notes], unknown=_unknown(rows))
    left = list(itertools.accumulate((row[-1].end for row in rows), max))
    first = [row[0] for row in rows]
    record.depth = depth_of(first, left)
    held = [_held(rows, number) for number in range(len(rows))]
    for number, (row, waits) in enumerate(zip(rows, waits_of_first_stage(first, left, held), strict=True)):
        record.micro_batches.append(_micro_batch(number, row, waits))
        record.spans += _spans(number, rows, held[number])
    record.batch = max(len(m.chunks) + m.decode_tokens for m in record.micro_batches)
    late = sum(w.end - w.start for m in record.micro_batches for w in m.waits if w.end == m.dispatched)
    if late:
        record.notes.append(
            f"Stage 0 waited {late:.3f} s before micro-batches that may be new prompts, with none in flight. No "
            "request had arrived, or the engine had not scheduled it. The trace does not show which."
        )
    engine = Counter(trace.engine for trace in lanes).most_common(1)[0][0]
    return ImportedRun(record, engine, transfers)


def _one_rank_a_stage(traces: Sequence[RankTrace], notes: list[str]) -> list[RankTrace]:
    """Return one trace per stage, in order."""
    if not traces:
        raise ConfigError("no trace of a rank")
    staged = with_stages(traces, notes)
    lanes: dict[int, RankTrace] = {}
    for trace in sorted(staged, key=lambda trace: (trace.tensor_rank, trace.rank)):
        assert trace.stage is not None
        lanes.setdefault(trace.stage, trace)
    for stage in range(max(lanes)):
        if stage not in lanes:
            raise ConfigError(f"no trace of stage {stage}, but one of stage {max(lanes)}; give those of all stages")
    beside = len(staged) - len(lanes)
    if beside:
        ranks = ", ".join(str(trace.rank) for trace in sorted(lanes.values(), key=lambda trace: trace.rank))
        notes.append(f"One rank represents each stage: {ranks}. The other {beside} are left out.")
    return [lanes[stage] for stage in sorted(lanes)]


def with_stages(traces: Sequence[RankTrace], notes: list[str]) -> list[RankTrace]:
    """Return the traces with their stages.

    If some trace does not specify its stage, stages are inferred from the sends and receives, else from the ranks.
    """
    if all(trace.stage is not None for trace in traces):
        return list(traces)
    by_rank = {trace.rank: trace for trace in traces}
    follows: dict[int, int] = {}
    for trace in traces:
        receiver, sender = _peer_of(trace.sends), _peer_of(trace.receives)
        if receiver in by_rank and receiver is not None and receiver > trace.rank:
            follows[trace.rank] = receiver
        if sender in by_rank and sender is not None and sender < trace.rank:
            follows.setdefault(sender, trace.rank)
    alone = [by_rank[rank] for rank in sorted(by_rank.keys() - follows.keys() - set(follows.values()))]
    if follows and alone:
        raise ConfigError(
            f"{alone[0].name}: the stage of rank {alone[0].rank} is unknown, since it exchanges messages with no other "
            "rank here; leave it out, or put the stage into the names of all files, as in TP-0-PP-1"
        )
    stage = dict.fromkeys(by_rank, 0)
    for rank in sorted(by_rank):
        if rank in follows:
            stage[follows[rank]] = stage[rank] + 1
    if not follows and len(by_rank) > 1:
        notes.append("The traces do not record the peers of sends: each rank is taken as a stage, in order.")
        stage = {rank: place for place, rank in enumerate(sorted(by_rank))}
    return [replace(trace, stage=stage[trace.rank]) for trace in traces]


def _peer_of(transfers: Sequence[Transfer]) -> int | None:
    peers = Counter(transfer.peer for transfer in transfers if transfer.peer is not None)
    return peers.most_common(1)[0][0] if peers else None


def _rows(spans: Sequence[Sequence[StageSpan]]) -> list[list[StageSpan]]:
    """Return the micro-batches that all stages recorded, each with its span on every stage."""
    shifts = [0]
    for upstream, downstream in itertools.pairwise(spans):
        shifts.append(shifts[-1] + shift_between(upstream, downstream))
    first = max(-shift for shift in shifts)
    last = min(len(own) - shift for own, shift in zip(spans, shifts, strict=True))
    return [[own[i + shift] for own, shift in zip(spans, shifts, strict=True)] for i in range(first, last)]


def _micro_batch(number: int, row: Sequence[StageSpan], waits: list[Wait]) -> MicroBatchRecord:
    step = next((span.step for span in row if span.step.has_tokens), row[0].step)
    decodes = step.decode_tokens or 0
    starts = _shares((step.decode_context or decodes) - decodes, decodes)
    chunks = []
    if step.prefill_tokens:
        count = min(step.prefill_requests or 1, step.prefill_tokens)
        tokens, prefixes = _shares(step.prefill_tokens, count), _shares(step.prefill_prefix or 0, count)
        chunks = [SegmentRecord(NOBODY, *pair) for pair in zip(prefixes, tokens, strict=True)]
    return MicroBatchRecord(
        number,
        row[0].begin,
        chunks,
        DecodesRecord.at([NOBODY] * decodes, starts),
        waits,
        row[-1].end,
        num_running=(step.prefill_requests or 0) + (step.decode_requests or 0),
    )


def _shares(total: int, count: int) -> list[int]:
    """Split `total` into `count` integers as evenly as possible: a trace contains only their sum."""
    return [total // count + (i < total % count) for i in range(count)]


def _held(rows: Sequence[Sequence[StageSpan]], number: int) -> tuple[float, float]:
    """Return when the receiver was ready and when the send ended, if the send blocked the first stage; else (0, 0)."""
    row, after = rows[number], rows[number + 1][0].begin if number + 1 < len(rows) else math.inf
    pairs = match_transfers(row[0], row[1]) if len(row) > 1 else []
    blocked = [pair for pair in pairs if pair.sender_wait > 0 and pair.receive.start > row[0].end]
    if not blocked or blocked[-1].send.end > after:
        return 0.0, 0.0
    return blocked[0].stood, max(blocked[0].stood, min(blocked[-1].send.end, blocked[-1].receive.end))


def _spans(number: int, rows: Sequence[Sequence[StageSpan]], held: tuple[float, float]) -> list[Span]:
    """Return the spans of one micro-batch.

    A send that outlasts the stage's idle time did not block it. A send that waited for its receiver (`held`) counts
    among the waits of the first stage.
    """
    found = []
    for stage, span in enumerate(rows[number]):
        before = rows[number - 1][stage].end if number else span.begin
        after = rows[number + 1][stage].begin if number + 1 < len(rows) else math.inf
        ready = min([before, span.begin, *(receive.start for receive in span.receives)])
        got = min([span.begin, max([ready, *(receive.end for receive in span.receives)])])
        sent = max([span.end, *(send.end for send in span.sends)])
        if stage + 1 < len(rows[number]):
            for pair in match_transfers(span, rows[number][stage + 1]):
                sent = min(sent, max(span.end, pair.receive.end))
        if stage == 0 and held[1] > 0.0:
            sent = span.end
        found.append(Span(number, stage, ready, got, span.begin, span.end, span.end if sent > after else sent))
    return found


def _unknown(rows: Sequence[Sequence[StageSpan]]) -> list[Unknown]:
    unknown: list[Unknown] = ["requests", "kv", "queue"]
    steps: list[Step] = [next((s.step for s in row if s.step.has_tokens), row[0].step) for row in rows]
    if not all(step.has_tokens for step in steps):
        unknown.append("tokens")
    if not all(step.decode_context is not None for step in steps if step.decode_tokens):
        unknown.append("context")
    return unknown


def _notes(
    lanes: Sequence[RankTrace], rows: Sequence[Sequence[StageSpan]], transfers: dict[int, list[MatchedTransfer]]
) -> list[str]:
    """Return the notes for the report, one line each."""
    notes = list(dict.fromkeys(note for trace in lanes for note in trace.notes))
    for stage, pairs in transfers.items():
        if not pairs:
            notes.append(f"The traces have no matching transfers from stage {stage - 1} to stage {stage}.")
            continue
        wait, transfer = sum(pair.wait for pair in pairs), sum(pair.transfer for pair in pairs)
        notes.append(
            f"Receives of stage {stage} took {wait + transfer:.3f} s: {wait:.3f} s waiting for the sender, "
            f"{transfer:.3f} s of transfer."
        )
    for stage in range(len(lanes)):
        busy = sum(row[stage].end - row[stage].begin for row in rows)
        computed = sum(row[stage].computed for row in rows)
        if computed < 0.9 * busy:
            notes.append(
                f"Stage {stage}: kernels or operators fill {computed / busy:.0%} of its compute time; the rest "
                "is launch overhead, or waiting within a micro-batch."
            )
    return notes
