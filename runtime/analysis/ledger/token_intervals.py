"""Decomposes each time to first token (TTFT) and time between tokens (TBT) exactly into parts.

An interval starts at the arrival or the previous token and ends at its token. At any moment, the parts follow the
request's oldest uncompleted micro-batch:

    w            dispatched    at stage 0                at stage 1                             completed
    |  wait for  | wait | con- |         | under | wait  |         |  ...  | wait | compute |  result  |
    |  dispatch  | for 0| trol | compute | way   | for 1 | compute |       |      |         |          |

w is the start of the interval, or the completion of the request's previous micro-batch. So a chunk pipelined behind
another chunk of its prompt counts from the completion of that chunk. A TBT contains one micro-batch, or several if the
request was preempted or is prefilled again after a fault. If speculative decoding yields several tokens per
micro-batch, all intervals but the first are 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from ...core.micro_batch_columns import Floats, Ints
from ...core.run_record import RunRecord
from .lanes import Lane, lanes_of
from .micro_batch_paths import CoordinatorWaits, MicroBatchPaths, StageEvent, WaitClass
from .request_segments import Bools, RequestSegments, places_of

_ROUNDING = 1e-9  # seconds; records round to it
_WIDEST = 64  # up to this distance between a request's consecutive micro-batches, a lookup table groups equal windows


class Part(IntEnum):
    """The parts that occur once per interval; `stage_part` gives the columns of the per-stage parts."""

    QUEUE = 0  # not admitted: behind other requests, or held back by the policy
    NO_ROOM = 1  # not admitted, nor was any prompt: KV cache or batch full, or the policy held prompts back
    TURN = 2  # admitted, not in flight: all in-flight slots were taken, or it was other requests' turn
    KV_TRANSFER = 3  # its KV was being transferred from another pipeline, or waited for the transfer
    RECOVERY = 4  # pipeline failure: work in flight was lost, until all stages ran again
    CONTROL = 5  # the coordinator's own time, and its message in transit
    RESULT = 6  # from the end on the last stage until the coordinator had the token
    UNKNOWN = 7  # the record has no micro-batch for it


class StagePart(IntEnum):
    """The parts that an interval has on each stage."""

    WAIT = 0  # the stage computed other micro-batches
    TRANSPORT = 1  # the activation was in transit; on stage 0: the stage was blocked by its last send
    COMPUTE = 2  # the stage computed the request's micro-batch


def stage_part(part: StagePart, stage: int) -> int:
    """Return the column of a stage's part."""
    return len(Part) + len(StagePart) * stage + part


@dataclass(frozen=True, slots=True)
class Windows:
    """The windows that intervals are cut into: in each, the interval follows one micro-batch of its request.

    Requests that decode in the same two consecutive micro-batches have equal windows, which share one kind.

    Attributes:
        interval: [W] the interval that contains the window.
        entry: [W] the request in the micro-batch, an entry of `RequestSegments`.
        kind: [W] a row of the arrays below, [K].
        row: [K] the micro-batch, a row of the paths.
        start: [K] seconds.
        gone: [K] from here to `back` the request was in a micro-batch dropped by a fault, or its KV was in transfer.
        back: [K] at most `dispatched`; equal to `gone` for nearly all windows.
        dispatched: [K] within the window.
        end: [K].
        parts: [K, parts] seconds.
    """

    interval: Ints
    entry: Ints
    kind: Ints
    row: Ints
    start: Floats
    gone: Floats
    back: Floats
    dispatched: Floats
    end: Floats
    parts: Floats


@dataclass(frozen=True, slots=True)
class _LoneWindows:
    """Windows that each form their own kind, before they are cut into parts.

    Attributes:
        interval, entry, row, start, end: as in `Windows`, one entry per window.
        queued: the request was not admitted before its dispatch.
        is_first: it is the first window of a request.
    """

    interval: Ints
    entry: Ints
    row: Ints
    start: Floats
    end: Floats
    queued: Bools
    is_first: Bools


class TokenIntervals:
    """The TTFTs and TBTs of a run as columns, one entry per token, ordered by request, then by token.

    Attributes:
        request: [n] number of the request.
        place: [n] its index in the record.
        token: [n] index of the token that ends the interval among its request's tokens.
        is_ttft: [n] false for a TBT, including the first token of a request whose KV came from another pipeline.
        start: [n] seconds on the coordinator's clock.
        end: [n].
        micro_batch: [n] number of the micro-batch that produced the token; -1 if the record has none.
        table: [rows, parts] seconds. Equal intervals share a row.
        row: [n] each interval's row in `table`.
        windows: one for each micro-batch in each interval.
        paths: the micro-batches' paths through the pipeline.
        segments: the requests' segments in them.
        waits: the coordinator's waits.

    Args:
        record: the run.
        lanes: the run's lanes, as in its `Ledger`; None: derived from the record.
    """

    def __init__(self, record: RunRecord, lanes: Sequence[Lane] | None = None) -> None:
        self.lanes = list(lanes_of(record.spans, record.num_stages) if lanes is None else lanes)
        self.paths = MicroBatchPaths.of(record, self.lanes)
        self.waits = CoordinatorWaits(record.micro_batches)
        self._read_tokens(record)
        self.segments = segments = RequestSegments(record, self.paths)
        last = segments.entries_of_tokens(self.place, self.token, self.end)
        is_first = self.token == 0
        before = np.append(-1, last[:-1])
        before[is_first] = segments.first[self.place[is_first]] - 1
        last = np.maximum(last, before)
        brought = last > before
        if not brought.all():  # another token of the same micro-batch
            shares = ~brought & ~is_first & (self.end <= self.start + _ROUNDING)
            brought = brought | shares
        rows = np.append(segments.row, -1)[last]
        self.micro_batch: Ints = np.where(brought, np.append(self.paths.micro_batch, -1)[rows], -1)
        self.windows = self._cut(record, before, last, rows)
        self.row, self.table = self._join(last - before)

    def _read_tokens(self, record: RunRecord) -> None:
        counts = np.array([len(r.token_times) for r in record.requests], np.int64)
        first = np.cumsum(counts) - counts
        times = [np.asarray(r.token_times, np.float64) for r in record.requests]
        self.end: Floats = np.concatenate([*times, np.empty(0)])
        self.place: Ints = np.repeat(np.arange(len(counts)), counts)
        self.token: Ints = np.arange(len(self.end)) - np.repeat(first, counts)
        numbers = np.array([r.request for r in record.requests], np.int64)
        self.request: Ints = numbers[self.place]
        self.start: Floats = np.append(0.0, self.end)[:-1]
        begun = counts > 0
        self.start[first[begun]] = np.array([r.arrival for r in record.requests], np.float64)[begun]
        self.start = np.minimum(self.start, self.end)
        came = np.array([r.kv_transfer is not None for r in record.requests], np.bool_)
        self.is_ttft: Bools = (self.token == 0) & ~came[self.place]

    @property
    def seconds(self) -> Floats:
        """[n] the length of each."""
        return self.end - self.start

    def __len__(self) -> int:
        return len(self.end)

    def _cut(self, record: RunRecord, before: Ints, last: Ints, rows: Ints) -> Windows:
        """Cut intervals into windows, and windows into parts. Equal windows of decodes are cut once.

        Args:
            record: the run.
            before: [n] the entry before the first of each interval, in `segments`.
            last: [n] its last entry.
            rows: [n] the micro-batch of the last entry.
        """
        plain = self._is_plain(record, before, last, rows)
        decodes = np.flatnonzero(plain)
        kind, chosen = _kinds(rows[decodes], rows[decodes - 1])
        alike, own = decodes[chosen], self._lone_windows(np.flatnonzero(~plain), before, last)
        row = np.concatenate([rows[alike], own.row])
        start, end = np.concatenate([self.start[alike], own.start]), np.concatenate([self.end[alike], own.end])
        queued = np.concatenate([np.zeros(len(alike), np.bool_), own.queued])
        away = {len(alike) + window: when for window, when in self._away(record, own).items()}
        dispatched = np.clip(self.paths.dispatched[row], start, end)
        parts = np.zeros((len(row), stage_part(StagePart.WAIT, len(self.lanes))))
        parts[:, : Part.RESULT], gone, back = self._cut_wait(start, dispatched, queued, away)
        self._cut_path(parts, row, dispatched, end)
        interval, entry = np.concatenate([decodes, own.interval]), np.concatenate([last[decodes], own.entry])
        kind = np.concatenate([kind, len(alike) + np.arange(len(own.row))])
        return Windows(interval, entry, kind, row, start, gone, back, dispatched, end, parts)

    def _is_plain(self, record: RunRecord, before: Ints, last: Ints, rows: Ints) -> Bools:
        """Return a mask [n] of intervals with a single decode, from one micro-batch's completion to the next's."""
        is_timely = np.abs(np.append(self.paths.completed, np.inf)[rows] - self.end) <= _ROUNDING
        plain: Bools = (last - before == 1) & is_timely & ~np.append(self.segments.begins_prefill, True)[last]
        plain[1:] &= is_timely[:-1]
        plain &= self.token > 0
        return plain if not record.faults else np.zeros_like(plain)

    def _lone_windows(self, intervals: Ints, before: Ints, last: Ints) -> _LoneWindows:
        """Return the windows of some intervals, one for each entry in an interval."""
        segments, counts = self.segments, (last - before)[intervals]
        interval = np.repeat(intervals, counts)
        nth = np.arange(len(interval)) - np.repeat(np.cumsum(counts) - counts, counts)
        entry = before[interval] + 1 + nth
        row, came_before = segments.row[entry], np.append(segments.row, -1)[entry - 1]
        low, high, completed = self.start[interval], self.end[interval], np.append(self.paths.completed, 0.0)
        start = np.where(nth == 0, low, np.clip(completed[came_before], low, high))
        end = np.where(entry == last[interval], high, np.clip(completed[row], low, high))
        queued = segments.begins_prefill[entry] & ((nth == 0) | segments.begins_again[entry])
        return _LoneWindows(interval, entry, row, start, end, queued, (self.token[interval] == 0) & (nth == 0))

    def _away(self, record: RunRecord, windows: _LoneWindows) -> dict[int, tuple[float, float, Part]]:
        """Return when a window's request was away before the dispatch.

        It was in a micro-batch dropped by a fault, or its KV was in transfer from another pipeline.
        """
        away: dict[int, tuple[float, float, Part]] = {}
        place, transfers = self.place[windows.interval], [request.kv_transfer for request in record.requests]
        for window in np.flatnonzero(windows.is_first).tolist() if any(transfers) else ():
            if (moved := transfers[place[window]]) is not None:
                away[window] = (*moved, Part.KV_TRANSFER)
        for window, lost in _lost_work(record, self.paths, place, windows.start, windows.row).items():
            away[window] = (*lost, Part.RECOVERY)
        return away

    def _cut_wait(
        self, start: Floats, dispatched: Floats, queued: Bools, away: dict[int, tuple[float, float, Part]]
    ) -> tuple[Floats, Floats, Floats]:
        """Cut the time before the dispatch, by what the coordinator waited for and when the request was `away`.

        Returns:
            [K, parts before `RESULT`] seconds, and `gone` and `back` of each window.
        """
        parts = np.zeros((len(start), Part.RESULT))
        gone, back = dispatched.copy(), dispatched.copy()
        for k, (since, until, part) in away.items():
            gone[k], back[k] = np.clip((since, max(since, until)), start[k], dispatched[k])
            parts[k, part] = back[k] - gone[k]
            queued[k] |= part is Part.KV_TRANSFER

        def waited(wait_class: WaitClass) -> Floats:
            until = [self.waits.until(times, wait_class) for times in (start, gone, back, dispatched)]
            return until[1] - until[0] + until[3] - until[2]

        busy, no_room = waited(WaitClass.BUSY), waited(WaitClass.NO_ROOM)
        moved, repaired = waited(WaitClass.KV_TRANSFER), waited(WaitClass.RECOVERY)
        parts[:, Part.QUEUE] = np.where(queued, busy, 0.0)
        parts[:, Part.NO_ROOM] = np.where(queued, no_room, 0.0)
        parts[:, Part.TURN] = np.where(queued, 0.0, busy + no_room)
        parts[:, Part.KV_TRANSFER] += moved
        parts[:, Part.RECOVERY] += repaired
        control = dispatched - start - (back - gone) - busy - no_room - moved - repaired
        parts[:, Part.CONTROL] = np.maximum(control, 0.0)  # rounding
        return parts, gone, back

    def _cut_path(self, parts: Floats, rows: Ints, dispatched: Floats, end: Floats) -> None:
        """Cut the time between the dispatch and the end of each window, clamped to the window."""
        at = dispatched
        for stage in range(self.paths.num_stages):
            cuts = []
            for point in StageEvent:
                reached = np.clip(self.paths.points[rows, stage, point], dispatched, end)
                cuts.append(reached - at)
                at = reached
            transport, wait = stage_part(StagePart.TRANSPORT, stage), stage_part(StagePart.WAIT, stage)
            on_the_way = Part.CONTROL if stage == 0 else transport
            parts[:, on_the_way] += cuts[StageEvent.INPUT] + cuts[StageEvent.BEGIN]
            parts[:, wait] = cuts[StageEvent.FREE]
            parts[:, transport] += cuts[StageEvent.SENT]
            parts[:, stage_part(StagePart.COMPUTE, stage)] = cuts[StageEvent.END]
        parts[:, Part.RESULT] += end - at

    def _join(self, counts: Ints) -> tuple[Ints, Floats]:
        """Return each interval's row, and all rows.

        First come the rows of the windows' kinds, then one row for each interval with several windows, or none.
        """
        windows = self.windows
        row = np.empty(len(counts), np.int64)
        row[windows.interval] = windows.kind
        others = np.flatnonzero(counts != 1)
        row[others] = len(windows.parts) + np.arange(len(others))
        joined = np.zeros((len(others), windows.parts.shape[1]))
        in_others = np.flatnonzero((counts != 1)[windows.interval])
        summed_in = np.searchsorted(others, windows.interval[in_others])
        np.add.at(joined, summed_in, windows.parts[windows.kind[in_others]])
        empty = counts[others] == 0
        joined[empty, Part.UNKNOWN] = self.seconds[others[empty]]
        return row, np.concatenate([windows.parts, joined])


def _kinds(row: Ints, came_before: Ints) -> tuple[Ints, Ints]:
    """Return the kind of each decode window, and one window of each kind.

    Windows of the same micro-batch whose requests also share their previous micro-batch are equal.
    """
    apart = row - came_before
    widest = int(apart.max(initial=0)) + 1
    if widest > _WIDEST:
        _, chosen, kind = np.unique(row * widest + apart, return_index=True, return_inverse=True)
        return kind, chosen
    code = row * widest + apart
    window_of = np.full((int(row.max(initial=-1)) + 1) * widest, -1)
    window_of[code] = np.arange(len(code))
    used = np.flatnonzero(window_of >= 0)
    number_of = np.empty(len(window_of), np.int64)
    number_of[used] = np.arange(len(used))
    return number_of[code], window_of[used]


def _lost_work(
    record: RunRecord, paths: MicroBatchPaths, place: Ints, start: Floats, row: Ints
) -> dict[int, tuple[float, float]]:
    """Return when work was lost, for windows in which a fault dropped the request's micro-batch.

    The lost time is from the first dispatch of a dropped micro-batch to the last fault.
    """
    if not record.faults or not len(place):
        return {}
    since = np.array([fault.since for fault in record.faults])
    completed = set(paths.place.tolist())
    numbers = np.array([r.request for r in record.requests], np.int64)
    first = np.searchsorted(place, np.arange(len(numbers) + 1))
    lost: dict[int, tuple[float, float]] = {}
    for number, dropped in enumerate(record.micro_batches):
        if number in completed:
            continue
        after = int(np.searchsorted(since, dropped.dispatched))
        if after == len(since):  # still in flight at the end
            continue
        carried = np.array([*{c.request for c in dropped.chunks}, *dropped.decodes.distinct], np.int64)
        for request in places_of(numbers, carried).tolist():
            own = slice(first[request], first[request + 1])
            window = first[request] + int(np.searchsorted(start[own], dropped.dispatched, side="right")) - 1
            if window < first[request] or paths.dispatched[row[window]] < since[after]:
                continue
            since_then = lost.get(window, (dropped.dispatched, 0.0))[0]
            lost[window] = (since_then, float(since[after]))
    return lost
