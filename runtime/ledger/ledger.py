"""The bubble ledger: every idle second of every stage, with exactly one cause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import numpy as np

from ..core.messages import Span
from ..core.micro_batch_columns import Floats, Ints, MicroBatchColumns
from ..core.run_record import MicroBatchRecord, RunRecord


class Cause(StrEnum):
    """Why a stage was idle. The paper's three bubbles (3.2) first, then what only a real pipeline shows."""

    PB1_PREFILL_SIZE = "pb1_prefill_size"
    PB2_PREFILL_DECODE = "pb2_prefill_decode"
    PB3_DECODE_CONTEXT = "pb3_decode_context"
    STAGE_IMBALANCE = "stage_imbalance"
    TRANSPORT = "transport"
    CONTROL = "control"
    STARVED_NO_REQUEST = "starved_no_request"
    STARVED_IN_FLIGHT = "starved_in_flight"
    STARVED_KV_FULL = "starved_kv_full"
    FILL_DRAIN = "fill_drain"

    @property
    def meaning(self) -> str:
        """One sentence for people."""
        return _MEANINGS[self]


_MEANINGS = {
    Cause.PB1_PREFILL_SIZE: "The stage waited for a micro-batch with another number of prefill tokens than its last.",
    Cause.PB2_PREFILL_DECODE: "Of the micro-batch that the stage waited for and its last, only one carried prefill.",
    Cause.PB3_DECODE_CONTEXT: "The stage waited for decodes over another context length than its last decodes'.",
    Cause.STAGE_IMBALANCE: "The stage waited for a micro-batch like its last, which yet took longer elsewhere: "
    "uneven layers, LM head, prefix length, jitter.",
    Cause.TRANSPORT: "The upstream stage had finished, and the activation was under way; or the stage was held up by "
    "its own send.",
    Cause.CONTROL: "Work was admissible, but the coordinator had not dispatched it yet, or its message was under way.",
    Cause.STARVED_NO_REQUEST: "No request was there to work on.",
    Cause.STARVED_IN_FLIGHT: "Every request with work left was already in flight, waiting for its token.",
    Cause.STARVED_KV_FULL: "Requests waited, but the KV cache had no room for them.",
    Cause.FILL_DRAIN: "Before the stage's first and after its last micro-batch of the run.",
}

CAUSES = tuple(Cause)
STARVED = (Cause.STARVED_NO_REQUEST, Cause.STARVED_IN_FLIGHT, Cause.STARVED_KV_FULL)
PIPELINE_BUBBLES = CAUSES[:4]  # those that a scheduler or a layer split can remove

_CODE = {cause: code for code, cause in enumerate(CAUSES)}
_SLOT = -1
_WAIT_CODE = {
    "depth_full": _SLOT,
    "no_request": _CODE[Cause.STARVED_NO_REQUEST],
    "in_flight": _CODE[Cause.STARVED_IN_FLIGHT],
    "kv_full": _CODE[Cause.STARVED_KV_FULL],
}
_IMBALANCE = _CODE[Cause.STAGE_IMBALANCE]
_TRANSPORT = _CODE[Cause.TRANSPORT]
_CONTROL = _CODE[Cause.CONTROL]
_FILL = _CODE[Cause.FILL_DRAIN]
_OUTSIDE = len(PIPELINE_BUBBLES)  # causes from this code on lie outside of what stages compute
_INSTANT = 1e-9  # seconds


@dataclass(frozen=True, slots=True)
class IdleInterval:
    """`stage` was idle in [start, end) (seconds, coordinator's clock) for `cause`, awaiting `micro_batch`.

    `micro_batch` is None only after the stage's last micro-batch.
    """

    stage: int
    start: float
    end: float
    cause: Cause
    micro_batch: int | None

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class IdleColumns:
    """Idle intervals of one stage as arrays, in order of time.

    `cause` indexes `CAUSES`; `place` is the awaited micro-batch's index in the stage's `Lane`, -1 after the last.
    """

    start: Floats
    end: Floats
    cause: Ints
    place: Ints

    @property
    def seconds(self) -> Floats:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Lane:
    """Micro-batches of one stage as arrays, in order of time; `row` indexes the run's micro-batches in ascending order.
    Until `sent` the stage was held up by the send of what it had computed."""

    micro_batch: Ints
    row: Ints
    begin: Floats
    end: Floats
    sent: Floats

    @property
    def seconds(self) -> Floats:
        return self.end - self.begin


class Ledger:
    """Idle time of a run, by cause, stage, micro-batch and request.

    A stage's idle interval [a, b) before its micro-batch i is told by when the stage before computed i, [B, E): from E
    on the activation was under way. A delay from outside that the stage before had in its own gap before i (transport,
    control, starvation) has come down the pipeline with i: as long here, right before E, if the gap is as long. But for
    that, up to B both stages waited, so it inherits the upstream stage's bubble; the rest, where the stage before
    computed, is a bubble, named by how the make-up of i, the awaited one, differs from that of the one just finished.
    Stage 0 may be held up by its own send; then the coordinator's waits say why nothing was dispatched. A wait for a
    slot (`depth_full`) is a bubble too, and what is awaited there is the micro-batch that holds the slot downstream
    (paper, Figure 5: PB_2).
    What no wait covers is control. All cuts are clamped to [a, b), so each second has one cause. A micro-batch
    without a span upstream (a run that was cut short) is named as a whole by the pair.

    Args:
        record: the run; times of all stages in seconds on one clock, micro-batches unique on each stage.
    """

    def __init__(self, record: RunRecord) -> None:
        self.num_stages = record.num_stages
        self.lanes = _lanes(record.spans, record.num_stages)
        begun = [float(lane.begin[0]) for lane in self.lanes if len(lane.begin)]
        arrivals = [request.arrival for request in record.requests]
        self.t0: float = min([*begun, *arrivals], default=0.0)
        self.t1: float = max((float(lane.end[-1]) for lane in self.lanes if len(lane.end)), default=self.t0)
        self.micro_batches = MicroBatchColumns(record.micro_batches)
        self.columns = _attribute(record, self.micro_batches, self.lanes, self.t0, self.t1)
        self._busy = [float(lane.seconds.sum()) for lane in self.lanes]
        self._by_cause = np.array(
            [np.bincount(c.cause, weights=c.seconds, minlength=len(CAUSES)) for c in self.columns]
        ).reshape(self.num_stages, len(CAUSES))

    @property
    def span_seconds(self) -> float:
        """From the first arrival (or the first compute) to the end of the last compute."""
        return self.t1 - self.t0

    @cached_property
    def idle(self) -> list[IdleInterval]:
        """All idle intervals, by stage, then by time."""
        intervals = []
        for stage, (lane, c) in enumerate(zip(self.lanes, self.columns, strict=True)):
            micro_batches = lane.micro_batch.tolist()
            columns = zip(c.start.tolist(), c.end.tolist(), c.cause.tolist(), c.place.tolist(), strict=True)
            for start, end, cause, place in columns:
                intervals.append(
                    IdleInterval(stage, start, end, CAUSES[cause], micro_batches[place] if place >= 0 else None)
                )
        return intervals

    def stage_name(self, stage: int) -> str:
        """As people read it."""
        return f"stage {stage}"

    def busy_seconds(self, stage: int | None = None) -> float:
        """Compute seconds of a stage, or of all."""
        return sum(self._busy) if stage is None else self._busy[stage]

    def seconds_by_cause(self, stage: int | None = None) -> dict[Cause, float]:
        """Idle seconds of a stage, or of all, for every cause."""
        seconds = self._by_cause.sum(axis=0) if stage is None else self._by_cause[stage]
        return dict(zip(CAUSES, seconds.tolist(), strict=True))

    @property
    def stage_seconds(self) -> float:
        """The run's span times the stages."""
        return self.span_seconds * self.num_stages

    @property
    def bubble_fraction(self) -> float:
        """Idle over total stage-seconds; 0 for an empty run."""
        return float(self._by_cause.sum()) / self.stage_seconds if self.stage_seconds > 0 else 0.0

    @property
    def bubble_fraction_inner(self) -> float:
        """The same without starved and fill_drain, above and below the line."""
        return inner_share(self.seconds_by_cause(), self.stage_seconds)

    def gaps(self, stage: int) -> tuple[Floats, Ints]:
        """For each micro-batch of `stage`, in order: idle seconds right before it; the code of the largest part's
        cause, an index into `CAUSES`, or -1 where there was no gap. Fill counts, as the first one's gap."""
        c, awaited = self.columns[stage], self.columns[stage].place >= 0
        table = np.zeros((len(self.lanes[stage].micro_batch), len(CAUSES)))
        np.add.at(table, (c.place[awaited], c.cause[awaited]), c.seconds[awaited])
        total = table.sum(axis=1)
        return total, np.where(total > 0, table.argmax(axis=1), -1)

    @cached_property
    def _bubble_by_micro_batch(self) -> dict[int, float]:
        micro_batches, seconds = [], []
        for lane, c in zip(self.lanes, self.columns, strict=True):
            inner = (c.cause != _FILL) & (c.place >= 0)
            micro_batches.append(lane.micro_batch[c.place[inner]])
            seconds.append(c.seconds[inner])
        known, place = np.unique(np.concatenate(micro_batches), return_inverse=True)
        summed = np.bincount(place, np.concatenate(seconds), len(known))
        return dict(zip(known.tolist(), summed.tolist(), strict=True))

    @cached_property
    def _bubble_by_request(self) -> dict[int, float]:
        by_micro_batch = self._bubble_by_micro_batch
        seconds = [by_micro_batch.get(micro_batch, 0.0) for micro_batch in self.micro_batches.micro_batch.tolist()]
        return self.micro_batches.by_request(np.array(seconds, np.float64))

    def bubble_of_micro_batch(self, micro_batch: int) -> float:
        """Idle seconds right before a micro-batch, summed over the stages, without fill."""
        return self._bubble_by_micro_batch.get(micro_batch, 0.0)

    def bubble_of_request(self, request: int) -> float:
        """Bubble seconds of all micro-batches that carried the request (paper 5.3)."""
        return self._bubble_by_request.get(request, 0.0)

    def check(self) -> None:
        """Conservation: on each stage busy time plus the seconds of all causes is the run's span."""
        for stage in range(self.num_stages):
            idle = float(self._by_cause[stage].sum())
            error = abs(self._busy[stage] + idle - self.span_seconds)
            assert error <= 1e-6 * self.span_seconds + 1e-9, (
                f"stage {stage}: busy {self._busy[stage]} s + idle {idle} s is not the run's {self.span_seconds} s"
            )
            assert not len(self.columns[stage].start) or self.columns[stage].seconds.min() >= 0.0, stage


def inner_share(seconds: Mapping[Cause, float], stage_seconds: float) -> float:
    """Idle over total stage-seconds, without starved and fill_drain above and below the line; 0 where nothing is left.

    Args:
        seconds: idle, by cause.
    """
    outer = sum(seconds[cause] for cause in (*STARVED, Cause.FILL_DRAIN))
    inner = stage_seconds - outer
    share = (sum(seconds.values()) - outer) / inner if inner > 1e-12 * stage_seconds else 0.0
    return min(1.0, share)  # which rounding may pass


class LiveBubbles:
    """A running estimate for a progress bar: idle over elapsed, each stage from its first begin to its last end."""

    def __init__(self) -> None:
        self._stages: dict[int, tuple[float, float, float]] = {}  # first begin, last end, busy

    def add(self, span: Span) -> None:
        first, last, busy = self._stages.get(span.stage, (span.begin, span.end, 0.0))
        self._stages[span.stage] = (min(first, span.begin), max(last, span.end), busy + span.end - span.begin)

    @property
    def bubble_fraction(self) -> float:
        """0 before the first span."""
        elapsed = sum(last - first for first, last, _ in self._stages.values())
        busy = sum(busy for *_, busy in self._stages.values())
        return min(1.0, max(0.0, 1.0 - busy / elapsed)) if elapsed > 0 else 0.0


def _lanes(spans: list[Span], num_stages: int) -> list[Lane]:
    """Spans by stage, in order of time; overlaps within rounding are clamped away."""
    stage = np.array([s.stage for s in spans], np.int64)
    micro_batch = np.array([s.micro_batch for s in spans], np.int64)
    begin = np.array([s.begin for s in spans], np.float64)
    end = np.array([s.end for s in spans], np.float64)
    sent = np.array([s.sent for s in spans], np.float64)
    assert not len(spans) or (stage.min() >= 0 and stage.max() < num_stages), "a span of a stage that does not exist"
    rows = np.unique(micro_batch)
    lanes = []
    for s in range(num_stages):
        mine = np.flatnonzero(stage == s)
        mine = mine[np.lexsort((micro_batch[mine], end[mine], begin[mine]))]
        b, e, k = begin[mine], end[mine], micro_batch[mine]
        tolerance = 1e-6 + 1e-9 * (float(e.max() - b.min()) if len(mine) else 0.0)
        assert len(np.unique(k)) == len(k), f"stage {s} computed a step twice"
        assert (e >= b - tolerance).all(), f"stage {s} ended a step before it began"
        e = np.maximum.accumulate(np.maximum(e, b))
        assert (b[1:] >= e[:-1] - tolerance).all(), f"stage {s} computed two steps at once"
        b[1:] = np.maximum(b[1:], e[:-1])
        lanes.append(Lane(k, np.searchsorted(rows, k), b, np.maximum(e, b), sent[mine]))
    return lanes


@dataclass(frozen=True, slots=True)
class _Waits:
    """The coordinator's waits by column, by the micro-batch that they came before (`row`, as a `Lane` has it), then by
    time; `cause` is `_SLOT` for a wait for a slot."""

    row: Ints
    start: Floats
    end: Floats
    cause: Ints

    @classmethod
    def of(cls, micro_batches: Sequence[MicroBatchRecord], row: Ints) -> _Waits:
        """`row` of each micro-batch, -1 of one that no stage has computed."""
        waits = [wait for micro_batch in micro_batches for wait in micro_batch.waits]
        rows = np.repeat(row, [len(micro_batch.waits) for micro_batch in micro_batches])
        start = np.array([wait.start for wait in waits], np.float64)
        end = np.array([wait.end for wait in waits], np.float64)
        cause = np.array([_WAIT_CODE[wait.reason] for wait in waits], np.int64)
        order = np.lexsort((end, start, rows))
        order = order[rows[order] >= 0]
        return cls(rows[order], start[order], end[order], cause[order])


def _attribute(
    record: RunRecord, micro_batches: MicroBatchColumns, lanes: list[Lane], t0: float, t1: float
) -> list[IdleColumns]:
    """Idle columns of each stage, in stage order, each from the one before."""
    known = np.unique(np.concatenate([lane.micro_batch for lane in lanes])) if lanes else np.zeros(0, np.int64)
    row = np.searchsorted(known, micro_batches.micro_batch)
    row[~np.isin(micro_batches.micro_batch, known)] = -1
    computed = row >= 0
    prefill, context = np.zeros(len(known), np.int64), np.zeros(len(known), np.int64)
    prefill[row[computed]], context[row[computed]] = micro_batches.prefill[computed], micro_batches.context[computed]
    waits = _Waits.of(record.micro_batches, row)

    columns: list[IdleColumns] = []
    for stage, lane in enumerate(lanes):
        if not len(lane.row):
            columns.append(_columns([(np.array([t0]), np.array([t1]), np.array([_FILL]), np.array([-1]))]))
            continue
        if stage == 0:
            awaited = _slot_holders(lane, lanes[-1], waits)
            pair = _pair_causes(prefill, context, lane.row[:-1], awaited)
            pieces = _first_stage(lane, pair, waits)
        else:
            pair = _pair_causes(prefill, context, lane.row[:-1], lane.row[1:])
            pieces = _later_stage(lane, pair, lanes[stage - 1], columns[-1], t0)
        fill = np.array([t0]), lane.begin[:1], np.array([_FILL]), np.array([0])
        drain = lane.end[-1:], np.array([t1]), np.array([_FILL]), np.array([-1])
        columns.append(_columns([fill, *pieces, drain]))
    return columns


Pieces = tuple[Floats, Floats, Ints, Ints]  # start, end, cause, place


def _pair_causes(prefill: Ints, context: Ints, finished: Ints, awaited: Ints) -> Ints:
    """The causes that the micro-batches just finished and those awaited (rows) make, by the paper's rules (3.2)."""
    was, now = prefill[finished], prefill[awaited]
    rules = [
        (was > 0) & (now > 0) & (was != now),
        (was > 0) != (now > 0),
        (was == 0) & (now == 0) & (context[finished] != context[awaited]),
    ]
    names = [Cause.PB1_PREFILL_SIZE, Cause.PB2_PREFILL_DECODE, Cause.PB3_DECODE_CONTEXT]
    return np.select(rules, [np.full(len(now), _CODE[name]) for name in names], _IMBALANCE)


def _places(lane: Lane, row: Ints) -> Ints:
    """Where in `lane` each of `row` is, -1 where it is not."""
    place = np.full(max(int(lane.row.max()), int(row.max(initial=-1))) + 1, -1)
    place[lane.row] = np.arange(len(lane.row))
    return place[row]


def _slot_holders(lane: Lane, last: Lane, waits: _Waits) -> Ints:
    """For each micro-batch of stage 0 after the first, the row that it awaited: the one whose end on the last stage
    ended its last wait for a slot (an arrival may have ended those before), or itself where it waited for none, or for
    its own predecessor (a depth of 1)."""
    awaited = lane.row[1:].copy()
    if not len(last.end):
        return awaited
    place = _places(lane, waits.row)
    slot = (waits.cause == _SLOT) & (place > 0)
    place, until = place[slot], waits.end[slot]
    final = np.append(place[1:] != place[:-1], True)[: len(place)]
    place, until = place[final], until[final]
    after = np.searchsorted(last.end, until)
    before, after = np.maximum(after - 1, 0), np.minimum(after, len(last.end) - 1)
    near = np.where(np.abs(last.end[after] - until) < np.abs(last.end[before] - until), after, before)
    earlier = last.row[near] < lane.row[place - 1]
    awaited[place[earlier] - 1] = last.row[near[earlier]]
    return awaited


def _first_stage(lane: Lane, pair: Ints, waits: _Waits) -> list[Pieces]:
    """Cut stage 0's gaps by the end of its last send and by the coordinator's waits; `pair` names those for a slot."""
    a, b = lane.end[:-1], lane.begin[1:]
    place = np.arange(1, len(lane.row))
    free = np.clip(lane.sent[:-1], a, np.maximum(a, b))
    own = _places(lane, waits.row)
    inside = own > 0
    own, cause = own[inside], waits.cause[inside]
    # Of a gap what lies before a wait, after the send and the waits before it, is control; so is what lies after all.
    low, high = waits.start[inside], np.minimum(waits.end[inside], b[own - 1])
    high = np.where(low < high, high, -np.inf)
    done = np.maximum.accumulate(np.concatenate([[-np.inf], high]))
    since = np.maximum(free[own - 1], done[:-1])
    low = np.maximum(low, since)
    until = free.copy()
    np.maximum.at(until, own - 1, high)
    control = np.full(len(own), _CONTROL)
    return [
        (a, free, np.full(len(a), _TRANSPORT), place),
        (since, np.where(low < high, low, since), control, own),
        (low, high, np.where(cause == _SLOT, pair[own - 1], cause), own),
        (until, b, np.full(len(a), _CONTROL), place),
    ]


def _later_stage(lane: Lane, pair: Ints, before: Lane, idle_before: IdleColumns, t0: float) -> list[Pieces]:
    """Cut a later stage's gaps by when the stage before was idle for, and then computed, the awaited micro-batch."""
    a, b, row = lane.end[:-1], lane.begin[1:], lane.row[1:]
    place = np.arange(1, len(lane.row))
    if not len(before.row):
        return [(a, b, pair, place)]
    up = _places(before, row)
    known = up >= 0

    # What the stage before was idle for; in each of its gaps, how much from outside there is from an interval on.
    between = idle_before.place > 0  # neither fill nor drain
    start, end, cause = idle_before.start[between], idle_before.end[between], idle_before.cause[between]
    gap = idle_before.place[between]
    outside = cause >= _OUTSIDE
    left = np.append(np.cumsum(np.where(outside, end - start, 0.0)[::-1])[::-1], 0.0)
    past = np.searchsorted(gap, np.arange(len(before.row)), side="right")  # of each gap
    delay = (left[np.append(0, past[:-1])] - left[past])[up] * known

    arrived = np.where(known, np.clip(before.end[up], a, b), b)
    due = arrived - delay  # when it had been there but for that
    due = np.where((delay > 0) & (due < a + _INSTANT), a, due)
    computed_from = np.clip(np.where(known, before.begin[up], a) - delay, a, due)
    idle_from = np.where(known, np.concatenate([before.begin[:1], before.end[:-1]])[up], a)
    busy_until = np.clip(idle_from, a, computed_from)  # until then it was still at an earlier micro-batch

    here = _places(lane, before.row[gap])
    shared = here > 0  # neither this stage's first, nor missing on it
    here, outside, start, end = here[shared], outside[shared], start[shared], end[shared]
    own = here - 1
    since, after = left[:-1][shared] - left[past[gap[shared]]], left[1:][shared] - left[past[gap[shared]]]
    earlier = delay[own] - since
    inherited = (
        np.where(outside, np.maximum(arrived[own] - since, due[own]), np.maximum(start - earlier, a[own])),
        np.where(outside, arrived[own] - after, np.minimum(end - earlier, computed_from[own])),
        cause[shared],
        here,
    )
    return [
        (a, busy_until, pair, place),
        inherited,
        (computed_from, due, pair, place),
        (arrived, b, np.full(len(a), _TRANSPORT), place),
    ]


def _columns(pieces: list[Pieces]) -> IdleColumns:
    """Pieces in order of time, empty ones dropped, neighbours of one cause and micro-batch joined."""
    start, end, cause, place = (np.concatenate([piece[i] for piece in pieces]) for i in range(4))
    kept = np.flatnonzero(end > start)
    kept = kept[np.argsort(start[kept], kind="stable")]
    start, end, cause, place = start[kept], end[kept], cause[kept], place[kept]
    new = np.ones(len(start), bool)
    new[1:] = (cause[1:] != cause[:-1]) | (place[1:] != place[:-1]) | (start[1:] != end[:-1])
    first = np.flatnonzero(new)
    last = np.append(first[1:], len(start)) - 1 if len(first) else first
    return IdleColumns(start[first], end[last], cause[first], place[first])
