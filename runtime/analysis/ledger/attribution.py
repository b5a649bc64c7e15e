"""Attributes each idle second to a cause: "The exact rule" of docs/ledger.md, vectorized over a stage's gaps.

A stage is idle in the gap [a, b): at a it finishes its last micro-batch, at b it starts the awaited one, i. A later
stage's gap is explained by what the previous stage, upstream, did: it had a gap from a' on, and computed i in [B, E).

                            a'                      B             E
    upstream    |###########|  bubble |    delay    |##### i #####|

                            a'        B-D           E-D
    undelayed   |###########|  bubble |##### i #####|

    this stage  |################|bub.|pair's bubble|    delay    |transport|# i #
                                 a    B-D           E-D           E         b

Upstream's gap contained bubbles and D seconds of delays from outside. The delays propagate down the pipeline with i and
end at E. Without them upstream would have computed i in [B - D, E - D), right after its bubbles. Until then both stages
waited for the same thing. While upstream computed, this stage had the bubble of its own pair: the micro-batch that it
finished last, and i. From E on the activation was in transit. All times are clamped to [a, b).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...core.micro_batch_columns import Floats, Ints, MicroBatchColumns, values_at
from ...core.run_record import MicroBatchRecord, Unknown
from .causes import DELAYS_FROM_OUTSIDE, Cause
from .idle import IdleColumns
from .lanes import Lane

_ROUNDING = 1e-9  # seconds
_FOR_A_SLOT = -1  # placeholder: the wait is a bubble, whose cause depends on the pair of micro-batches
_WAIT_CODES = {
    "depth_full": _FOR_A_SLOT,
    "no_request": Cause.STARVED_NO_REQUEST.code,
    "in_flight": Cause.STARVED_IN_FLIGHT.code,
    "kv_full": Cause.STARVED_KV_FULL.code,
    "kv_transfer": Cause.TRANSPORT.code,
    "recovery": Cause.RECOVERY.code,
    "unknown": Cause.UNKNOWN.code,
    "send": Cause.TRANSPORT.code,
}
_ALIKE = 0.1  # micro-batches whose times on a stage differ by at most this share of the longer count as alike


def attribute(
    records: Sequence[MicroBatchRecord],
    micro_batches: MicroBatchColumns,
    lanes: Sequence[Lane],
    leaving: Lane,
    t0: float,
    t1: float,
    unknown: Sequence[Unknown] = (),
) -> list[IdleColumns]:
    """Return all idle intervals of each stage, in stage order.

    Args:
        records: the run's micro-batches.
        micro_batches: the same as columns.
        lanes: the micro-batches of each stage.
        leaving: the micro-batches as they left the pipeline: the last stage's lane, unless the last stage changed.
        t0: start of the run, in seconds.
        t1: its end.
        unknown: what the record lacks about its micro-batches.
    """
    idle: list[IdleColumns] = []
    for stage, lane in enumerate(lanes):
        if not len(lane.row):
            idle.append(IdleColumns.joined([_fill_or_drain(t0, t1, place=-1)]))
            continue
        gaps = _Gaps.of(lane)
        if stage == 0:
            waits = _Waits.of(records, micro_batches.places(gaps.awaited))
            awaited = _awaited_by_stage_0(gaps, waits, leaving)
            pair = _pair_bubbles(micro_batches, gaps.finished, awaited, leaving, unknown)
            pieces = _stage_0(gaps, waits, lane.sent[:-1], pair)
        else:
            pair = _pair_bubbles(micro_batches, gaps.finished, gaps.awaited, lanes[stage - 1], unknown)
            pieces = _later_stage(lane, gaps, pair, lanes[stage - 1], idle[-1])
        fill = _fill_or_drain(t0, float(lane.begin[0]), place=0)
        drain = _fill_or_drain(float(lane.end[-1]), t1, place=-1)
        idle.append(IdleColumns.joined([fill, *pieces, drain]))
    return idle


def _fill_or_drain(start: float, end: float, place: int) -> IdleColumns:
    return IdleColumns.of(np.array([start]), np.array([end]), Cause.FILL_DRAIN, np.array([place]))


@dataclass(frozen=True, slots=True)
class _Gaps:
    """The gaps [a, b) of a stage, in time order: one before each micro-batch after the first."""

    a: Floats
    b: Floats
    finished: Ints  # micro-batch
    awaited: Ints
    place: Ints  # of the awaited micro-batch in the lane

    @classmethod
    def of(cls, lane: Lane) -> _Gaps:
        place = np.arange(1, len(lane.row))
        return cls(lane.end[:-1], lane.begin[1:], lane.micro_batch[:-1], lane.micro_batch[1:], place)


def _pair_bubbles(
    micro_batches: MicroBatchColumns, finished: Ints, awaited: Ints, holder: Lane, unknown: Sequence[Unknown]
) -> Ints:
    """Return the bubble code of each pair of micro-batches, by the paper's rules (3.2).

    `holder`: lane of the stage that this one waited for; its times substitute for `unknown` token counts or contexts.
    """
    is_alike = _alike(holder, finished, awaited) if "tokens" in unknown or "context" in unknown else None
    finished, awaited = micro_batches.places(finished), micro_batches.places(awaited)
    was, now = values_at(micro_batches.prefill, finished), values_at(micro_batches.prefill, awaited)
    context_was, context_now = values_at(micro_batches.context, finished), values_at(micro_batches.context, awaited)
    rules = {
        Cause.PB1_PREFILL_SIZE: (was > 0) & (now > 0) & (was != now),
        Cause.PB2_PREFILL_DECODE: (was > 0) != (now > 0),
        Cause.PB3_DECODE_CONTEXT: (was == 0) & (now == 0) & (context_was != context_now),
    }
    if "context" in unknown:  # infer different contexts from different times
        rules[Cause.PB3_DECODE_CONTEXT] = (was == 0) & (now == 0) & (is_alike == 0)
    codes = np.select(list(rules.values()), [cause.code for cause in rules], Cause.STAGE_IMBALANCE.code)
    if "tokens" in unknown:
        tokens = micro_batches.tokens
        has_none = (values_at(tokens, finished) == 0) | (values_at(tokens, awaited) == 0)
        codes = np.where(has_none, np.where(is_alike == 1, Cause.STAGE_IMBALANCE.code, Cause.UNKNOWN.code), codes)
    return codes


def _alike(holder: Lane, finished: Ints, awaited: Ints) -> Ints:
    """Return whether a stage took similar times for both micro-batches of a pair: 1, 0, or -1 if one is missing."""
    order = np.argsort(holder.micro_batch, kind="stable")
    numbers, seconds = holder.micro_batch[order], np.append(holder.seconds[order], np.nan)

    def seconds_of(wanted: Ints) -> Floats:
        place = np.searchsorted(numbers, wanted)
        return seconds[np.where(np.append(numbers, -1)[place] == wanted, place, -1)]

    was, now = seconds_of(finished), seconds_of(awaited)
    is_known = np.isfinite(was) & np.isfinite(now)
    return np.where(is_known, np.abs(was - now) <= _ALIKE * np.fmax(was, now), -1).astype(np.int64)


@dataclass(frozen=True, slots=True)
class _Waits:
    """The coordinator's waits before each awaited micro-batch, ordered by gap of stage 0, then by time."""

    gap: Ints
    start: Floats
    end: Floats
    cause: Ints

    @classmethod
    def of(cls, records: Sequence[MicroBatchRecord], awaited: Ints) -> _Waits:
        """Collect the waits before the micro-batch of each gap; `awaited` is its index in `records`, -1 for none."""
        waits = [(gap, wait) for gap, at in enumerate(awaited.tolist()) if at >= 0 for wait in records[at].waits]
        gaps = np.array([gap for gap, _ in waits], np.int64)
        start = np.array([wait.start for _, wait in waits], np.float64)
        end = np.array([wait.end for _, wait in waits], np.float64)
        cause = np.array([_WAIT_CODES[wait.reason] for _, wait in waits], np.int64)
        order = np.lexsort((end, start, gaps))
        return cls(gaps[order], start[order], end[order], cause[order])


def _awaited_by_stage_0(gaps: _Gaps, waits: _Waits, last: Lane) -> Ints:
    """Return the micro-batch that stage 0 awaited in each gap: the one that held the slot, else the next one.

    The holder is the micro-batch whose end on the last stage ended the last wait for a slot. It counts only if it
    precedes the micro-batch that stage 0 finished last: with a depth of 1 that one holds the slot itself.
    """
    awaited = gaps.awaited.copy()
    if not len(last.end):
        return awaited
    for_a_slot = waits.cause == _FOR_A_SLOT
    slot_free = np.full(len(awaited), -np.inf)
    np.maximum.at(slot_free, waits.gap[for_a_slot], waits.end[for_a_slot])
    waited = np.flatnonzero(slot_free > -np.inf)
    holder = last.micro_batch[_nearest(last.end, slot_free[waited])]
    is_earlier = holder < gaps.finished[waited]
    awaited[waited[is_earlier]] = holder[is_earlier]
    return awaited


def _nearest(times: Floats, to: Floats) -> Ints:
    """Return, for each of `to`, the index of the nearest of the ascending `times`; the earlier on a tie."""
    after = np.searchsorted(times, to)
    before, after = np.maximum(after - 1, 0), np.minimum(after, len(times) - 1)
    return np.where(np.abs(times[after] - to) < np.abs(times[before] - to), after, before)


def _stage_0(gaps: _Gaps, waits: _Waits, sent: Floats, pair: Ints) -> list[IdleColumns]:
    """Cut the gaps by the end of the last send (`sent`), then by the waits; `pair`: causes of waits for a slot."""
    sent = np.clip(sent, gaps.a, gaps.b)
    gap, place = waits.gap, gaps.place[waits.gap]
    wait_end = np.clip(waits.end, gaps.a[gap], gaps.b[gap])
    earlier_end = np.maximum.accumulate(np.append(-np.inf, wait_end))[:-1]
    control_start = np.maximum(sent[gap], earlier_end)
    wait_start = np.clip(waits.start, control_start, gaps.b[gap])
    wait_cause = np.where(waits.cause == _FOR_A_SLOT, pair[gap], waits.cause)
    all_over = sent.copy()  # the send and all waits
    np.maximum.at(all_over, gap, wait_end)
    return [
        IdleColumns.of(gaps.a, sent, Cause.TRANSPORT, gaps.place),
        IdleColumns.of(control_start, wait_start, Cause.CONTROL, place),
        IdleColumns.of(wait_start, wait_end, wait_cause, place),
        IdleColumns.of(all_over, gaps.b, Cause.CONTROL, gaps.place),
    ]


@dataclass(frozen=True, slots=True)
class _UpstreamGaps:
    """The idle intervals in upstream's gaps, one entry each, and the seconds of delays from outside in these gaps."""

    place: Ints  # of the awaited micro-batch upstream
    start: Floats
    end: Floats
    cause: Ints
    is_delay: npt.NDArray[np.bool_]
    delay_from: Floats  # seconds of delays from this interval on, to the end of its gap
    delay_after: Floats  # the same, from the next interval on
    delay: Floats  # by place: seconds of delays in the gap before that micro-batch

    @classmethod
    def of(cls, idle: IdleColumns, num_micro_batches: int) -> _UpstreamGaps:
        in_gap = idle.place > 0  # neither fill nor drain
        place, start, end, cause = idle.place[in_gap], idle.start[in_gap], idle.end[in_gap], idle.cause[in_gap]
        is_delay = np.isin(cause, [delay.code for delay in DELAYS_FROM_OUTSIDE])
        to_run_end = np.append(np.cumsum(np.where(is_delay, end - start, 0.0)[::-1])[::-1], 0.0)
        after_gap = np.searchsorted(place, np.arange(num_micro_batches), side="right")  # the first interval after it
        first = np.append(0, after_gap[:-1])
        beyond = to_run_end[after_gap[place]]
        delay = to_run_end[first] - to_run_end[after_gap]
        return cls(place, start, end, cause, is_delay, to_run_end[:-1] - beyond, to_run_end[1:] - beyond, delay)


@dataclass(frozen=True, slots=True)
class _Arrivals:
    """When each gap's awaited micro-batch was computed upstream and arrived, clamped to the gap; see the diagram.

    If upstream has no span of it, `undelayed_begin` is a and `arrival` is b.
    """

    upstream_free: Floats  # a'
    undelayed_begin: Floats  # B - D
    undelayed_arrival: Floats  # E - D
    arrival: Floats  # E
    delay: Floats  # D, not clamped

    @classmethod
    def of(cls, gaps: _Gaps, upstream: Lane, place: Ints, upstream_delay: Floats) -> _Arrivals:
        """Compute them from the upstream index (`place`) of each awaited micro-batch, -1 if it has no span there."""

        def at_place(values: Floats, otherwise: Floats | float) -> Floats:
            return np.where(place >= 0, values[place], otherwise)

        a, b = gaps.a, gaps.b
        delay = at_place(upstream_delay, 0.0)
        arrival = np.clip(at_place(upstream.end, b), a, b)
        undelayed_arrival = arrival - delay
        undelayed_arrival = np.where((delay > 0) & (undelayed_arrival < a + _ROUNDING), a, undelayed_arrival)
        undelayed_begin = np.clip(at_place(upstream.begin, a) - delay, a, undelayed_arrival)
        gap_begin = np.append(upstream.begin[:1], upstream.end[:-1])  # there is no gap before the first
        upstream_free = np.clip(at_place(gap_begin, a), a, undelayed_begin)
        return cls(upstream_free, undelayed_begin, undelayed_arrival, arrival, delay)


def _later_stage(lane: Lane, gaps: _Gaps, pair: Ints, upstream: Lane, upstream_idle: IdleColumns) -> list[IdleColumns]:
    """Cut the gaps as the diagram above shows; `pair` holds the codes of the pairs' bubbles."""
    if not len(upstream.row):
        return [IdleColumns.of(gaps.a, gaps.b, pair, gaps.place)]
    inherited = _UpstreamGaps.of(upstream_idle, len(upstream.row))
    arrivals = _Arrivals.of(gaps, upstream, upstream.places(lane.row[1:]), inherited.delay)
    gap = lane.places(upstream.row[inherited.place]) - 1  # this stage's gap before the same micro-batch
    bubbles = np.flatnonzero((gap >= 0) & ~inherited.is_delay)
    delays = np.flatnonzero((gap >= 0) & inherited.is_delay)
    return [
        IdleColumns.of(gaps.a, arrivals.upstream_free, pair, gaps.place),
        _shared_bubbles(gaps, arrivals, inherited, bubbles, gap[bubbles], pair),
        IdleColumns.of(arrivals.undelayed_begin, arrivals.undelayed_arrival, pair, gaps.place),
        _passed_delays(gaps, arrivals, inherited, delays, gap[delays]),
        IdleColumns.of(arrivals.arrival, gaps.b, Cause.TRANSPORT, gaps.place),
    ]


def _shared_bubbles(
    gaps: _Gaps, arrivals: _Arrivals, inherited: _UpstreamGaps, bubbles: Ints, gap: Ints, pair: Ints
) -> IdleColumns:
    """Return the previous stage's `bubbles`, shifted to where they would be without delays.

    They are clamped to their `gap` on this stage. A wait for a repair is not shared: `recovery.py` assigns that time
    on every stage.
    """
    delay_before = arrivals.delay[gap] - inherited.delay_from[bubbles]
    start = np.maximum(inherited.start[bubbles] - delay_before, gaps.a[gap])
    end = np.minimum(inherited.end[bubbles] - delay_before, arrivals.undelayed_begin[gap])
    cause = inherited.cause[bubbles]
    cause = np.where(cause == Cause.RECOVERY.code, pair[gap], cause)
    return IdleColumns.of(start, end, cause, gaps.place[gap])


def _passed_delays(gaps: _Gaps, arrivals: _Arrivals, inherited: _UpstreamGaps, delays: Ints, gap: Ints) -> IdleColumns:
    """Return the previous stage's `delays`, moved to right before the arrival and clamped to their `gap` here."""
    start = np.maximum(arrivals.arrival[gap] - inherited.delay_from[delays], arrivals.undelayed_arrival[gap])
    end = arrivals.arrival[gap] - inherited.delay_after[delays]
    return IdleColumns.of(start, end, inherited.cause[delays], gaps.place[gap])
