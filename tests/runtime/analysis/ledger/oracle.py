"""The ledger's rule applied to one instant at a time: plain and slow, written from the rule and not from the code."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from gapless.runtime.analysis.ledger.causes import Cause
from gapless.runtime.core.messages import Span
from gapless.runtime.core.run_record import MicroBatchRecord, RunRecord, Wait
from tests.support.idle_intervals import IdleInterval

WAITED_FOR = {
    "no_request": Cause.STARVED_NO_REQUEST,
    "in_flight": Cause.STARVED_IN_FLIGHT,
    "kv_full": Cause.STARVED_KV_FULL,
    "recovery": Cause.RECOVERY,
}
BUBBLES = (Cause.PB1_PREFILL_SIZE, Cause.PB2_PREFILL_DECODE, Cause.PB3_DECODE_CONTEXT, Cause.STAGE_IMBALANCE)
DELAYS = (Cause.TRANSPORT, Cause.CONTROL, Cause.STARVED_NO_REQUEST, Cause.STARVED_IN_FLIGHT, Cause.STARVED_KV_FULL)

Passed = list[tuple[float, float, Cause | None]]  # start, end; None: the pair's bubble


class Oracle:
    """Idle time of a run whose micro-batches all have a record; no event lies inside a piece."""

    def __init__(self, record: RunRecord) -> None:
        self.record = record
        self.micro_batches = {entry.micro_batch: entry for entry in record.micro_batches}
        self.places = {entry.micro_batch: place for place, entry in enumerate(record.micro_batches)}
        self.spans = {(span.stage, span.micro_batch): span for span in record.spans}
        waits = [wait for entry in record.micro_batches for wait in entry.waits]
        self.events = {t for wait in waits for t in (wait.start, wait.end)}
        self.events |= {t for span in record.spans for t in (span.begin, span.end, span.sent)}
        self.gaps: dict[tuple[int, int | None], list[IdleInterval]] = {}  # by stage and awaited micro-batch

    def idle(self) -> list[IdleInterval]:
        """All idle pieces, by stage, then by time."""
        begins = [span.begin for span in self.record.spans]
        run_begin = min(begins + [request.arrival for request in self.record.requests], default=0.0)
        run_end = max((span.end for span in self.record.spans), default=run_begin)
        for stage in range(self.record.num_stages):
            spans = [span for span in self.record.spans if span.stage == stage]
            spans.sort(key=lambda span: (span.begin, span.end))
            for first in spans[:1]:
                fill = IdleInterval(stage, run_begin, first.begin, Cause.FILL_DRAIN, first.micro_batch)
                self.gaps[stage, first.micro_batch] = [fill]
            for finished, awaited in pairwise(spans):
                self.gaps[stage, awaited.micro_batch] = self.gap(finished, awaited)
            drained = spans[-1].end if spans else run_begin
            self.gaps[stage, None] = [IdleInterval(stage, drained, run_end, Cause.FILL_DRAIN, None)]
        pieces = [part for gap in self.gaps.values() for piece in gap for part in self.repaired(piece)]
        return [piece for piece in pieces if piece.seconds > 0]

    def repaired(self, piece: IdleInterval) -> list[IdleInterval]:
        """Return the parts of a piece by whether a fault was under repair."""
        times = {t for fault in self.record.faults for t in (fault.since, fault.up) if t is not None}
        parts = []
        times = {piece.start, piece.end} | {t for t in times if piece.start < t < piece.end}
        for start, end in pairwise(sorted(times)):
            is_down = any(
                fault.since <= start and (fault.up is None or end <= fault.up) for fault in self.record.faults
            )
            parts.append(replace(piece, start=start, end=end, cause=Cause.RECOVERY if is_down else piece.cause))
        return parts

    def gap(self, finished: Span, awaited: Span) -> list[IdleInterval]:
        """Return the pieces between two micro-batches that a stage computes one after the other."""
        stage, a, b = awaited.stage, finished.end, awaited.begin
        upstream = self.spans.get((stage - 1, awaited.micro_batch))
        passed = self.passed_on(upstream, a, b) if upstream else []
        cuts = self.events | {t for start, end, _ in passed for t in (start, end)}
        pieces = []
        for start, end in pairwise(sorted({a, b} | {t for t in cuts if a < t < b})):
            t = (start + end) / 2
            cause = self.later_stage(t, finished, awaited, passed) if stage else self.stage_0(t, finished, awaited)
            pieces.append(IdleInterval(stage, start, end, cause, awaited.micro_batch))
        return pieces

    def stage_0(self, t: float, finished: Span, awaited: Span) -> Cause:
        if t < finished.sent:
            return Cause.TRANSPORT
        waits = self.waits_before(awaited.micro_batch)
        for wait in waits:
            if wait.start <= t < wait.end:
                holder = self.slot_holder(waits, finished, awaited)
                return WAITED_FOR.get(wait.reason) or self.bubble(finished.micro_batch, holder)
        return Cause.CONTROL

    def waits_before(self, micro_batch: int) -> list[Wait]:
        """Those before a micro-batch, and before any right before it that a fault ended before it began."""
        first = at = self.places[micro_batch]
        while first and self.never_began(self.record.micro_batches[first - 1]):
            first -= 1
        return [wait for entry in self.record.micro_batches[first : at + 1] for wait in entry.waits]

    def never_began(self, entry: MicroBatchRecord) -> bool:
        is_over = any(entry.dispatched <= fault.detected for fault in self.record.faults)
        return entry.completed is None and is_over and (0, entry.micro_batch) not in self.spans

    def slot_holder(self, waits: list[Wait], finished: Span, awaited: Span) -> int:
        ends = [wait.end for wait in waits if wait.reason == "depth_full"]
        last = [span for span in self.record.spans if span.stage == self.record.num_stages - 1]
        if not ends or not last:
            return awaited.micro_batch
        holder = min(last, key=lambda span: abs(span.end - ends[-1])).micro_batch
        return holder if holder < finished.micro_batch else awaited.micro_batch

    def later_stage(self, t: float, finished: Span, awaited: Span, passed: Passed) -> Cause:
        upstream = self.spans.get((awaited.stage - 1, awaited.micro_batch))
        if upstream and t >= upstream.end:
            return Cause.TRANSPORT
        pair = self.bubble(finished.micro_batch, awaited.micro_batch)
        return next((cause for start, end, cause in passed if start <= t < end), None) or pair

    def passed_on(self, upstream: Span, a: float, b: float) -> Passed:
        """Return what the upstream stage's gap passes on to the gap [a, b); where two overlap, the first one holds."""
        gap = self.gaps[upstream.stage, upstream.micro_batch]
        passed: Passed = []
        until = min(max(upstream.end, a), b)
        for piece in reversed([piece for piece in gap if piece.cause in DELAYS]):
            passed.append((until - piece.seconds, until, piece.cause))
            until -= piece.seconds
        since = gap[0].start if gap else 0.0
        for piece in [piece for piece in gap if piece.cause not in DELAYS and piece.cause is not Cause.FILL_DRAIN]:
            shared = piece.cause if piece.cause in BUBBLES else None  # the wait for a repair is each stage's own
            passed.append((since, since + piece.seconds, shared))
            since += piece.seconds
        return passed

    def bubble(self, finished: int, awaited: int) -> Cause:
        done, due = self.micro_batches[finished], self.micro_batches[awaited]
        if done.prefill_tokens and due.prefill_tokens:
            return Cause.STAGE_IMBALANCE if done.prefill_tokens == due.prefill_tokens else Cause.PB1_PREFILL_SIZE
        if done.prefill_tokens or due.prefill_tokens:
            return Cause.PB2_PREFILL_DECODE
        return Cause.STAGE_IMBALANCE if done.decode_context == due.decode_context else Cause.PB3_DECODE_CONTEXT
