"""A run's recorded spans as a max-plus system, to replay with other times.

It needs no cost model, no config and no requests. Each stage computes its micro-batches in their recorded order. A
stage starts one as soon as its host is ready and the activation has arrived; stage 0, once the coordinator has
dispatched it. A dispatch follows the completion of an earlier micro-batch, or keeps its time if it waited for an
arrival or a repair. The binding constraint of each start has its recorded lag, so a replay of unchanged times is the
run itself. Lags of other constraints are taken from the spans if recorded, and estimated otherwise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...core.micro_batch_columns import Floats, Ints, values_at
from ...core.run_record import RunRecord
from ..ledger.ledger import Ledger
from ..ledger.stragglers import common_places
from .arrivals import clients_of

_ROUNDING = 2e-6  # seconds: run folders hold microseconds
_LEAST = 8  # micro-batches that all stages computed
_BOUND = 0.9  # dispatches follow completions if that cuts the spread of stage 0's gaps below this share
_PASSES = 3  # of separating waits for an input from waits for a stage's host

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Times:
    """The inputs of a replay: seconds by stage and micro-batch.

    Attributes:
        compute: compute time on each stage, [S, N].
        turn: from when a stage is free until it could start its next micro-batch, [S, N].
        send: how long a stage is blocked by its own send after computing, [S, N]. If sender and receiver wait for each
            other (`meets`), it starts when the activation has arrived.
        link: an activation over each link, [S - 1, N].
        follows: the micro-batch whose completion each dispatch followed, [N]; -1 for none.
        gap: from that completion until stage 0 could start, or that time itself for none, [N].
        floor: when the requests of each micro-batch had arrived, [N].
        meets: by link, whether a send waits until its receiver is ready (rendezvous).
    """

    compute: Floats
    turn: Floats
    send: Floats
    link: Floats
    follows: Ints
    gap: Floats
    floor: Floats
    meets: tuple[bool, ...]

    def replay(self) -> tuple[Floats, Floats]:
        """Return the start and end times of each micro-batch on each stage, [S, N] each."""
        stages, count = self.compute.shape
        after, last, meets = range(1, stages), stages - 1, self.meets
        free, arrived = [-math.inf] * stages, [-math.inf] * stages
        done: list[float] = []
        begins: list[float] = []
        ends: list[float] = []
        link = np.vstack([self.link, np.zeros(count)])
        rows = (zip(*each.tolist(), strict=True) for each in (self.compute, self.turn, self.send, link))
        dispatches = (each.tolist() for each in (self.follows, self.gap, self.floor))
        for compute, turn, send, way, follows, gap, floor in zip(*rows, *dispatches, strict=True):
            at = max(done[follows] + gap if follows >= 0 else gap, floor)
            begin = max(at, free[0] + turn[0])
            end = begin + compute[0]
            begins.append(begin)
            ends.append(end)
            for stage in after:
                ready, before = free[stage] + turn[stage], stage - 1
                at = end if end > arrived[stage] else arrived[stage]
                if meets[before]:
                    at = (at if at > ready else ready) + way[before]
                    free[before] = max(end, at + send[before])
                else:
                    at += way[before]
                    free[before] = end + send[before]
                arrived[stage] = at
                begin = at if at > ready else ready
                end = begin + compute[stage]
                begins.append(begin)
                ends.append(end)
            free[last] = end + send[last]
            done.append(end)
        shape = (count, stages)
        return np.array(begins, np.float64).reshape(shape).T, np.array(ends, np.float64).reshape(shape).T


def times_of(record: RunRecord, ledger: Ledger) -> tuple[Times, list[Ints]] | None:
    """Return the times to replay a run from, and the places of its micro-batches in each stage's lane.

    Micro-batches that not all stages computed are left out. None if fewer than eight remain, or if the stages' orders
    differ.
    """
    lanes = ledger.lanes
    if not all(len(lane.row) for lane in lanes):
        return None
    places = [np.sort(place) for place in common_places(lanes)]
    numbers = lanes[0].micro_batch[places[0]]
    of_run = ledger.micro_batches.places(numbers)
    places = [place[of_run >= 0] for place in places]
    numbers, of_run = numbers[of_run >= 0], of_run[of_run >= 0]
    is_same = all(np.array_equal(lane.micro_batch[place], numbers) for lane, place in zip(lanes, places, strict=True))
    if len(numbers) < _LEAST or not is_same:
        return None
    begin, end, sent = (
        np.stack([getattr(lane, name)[place] for lane, place in zip(lanes, places, strict=True)])
        for name in ("begin", "end", "sent")
    )
    spans = {(span.stage, span.micro_batch): (span.ready, span.input) for span in record.spans}
    seen = [[spans[stage, number] for number in numbers.tolist()] for stage in range(len(lanes))]
    ready, came = np.moveaxis(np.array(seen, np.float64), 2, 0)
    tokens = values_at(ledger.micro_batches.tokens, of_run).astype(np.float64)
    sent = np.maximum(sent, end)
    sent[0, :-1] = np.maximum(sent[0, :-1], _held_until(record, of_run[1:]))
    sent[:, :-1] = np.minimum(sent[:, :-1], np.maximum(begin[:, 1:], end[:, :-1]))
    is_traced = "requests" in record.unknown  # by another engine: dispatches, arrivals and hidden inputs are unknown
    stood = np.clip(ready, _after(sent), begin)
    shown = [_meets(end[stage - 1], sent[stage - 1], stood[stage]) for stage in range(1, len(lanes))]
    usual = is_traced and False not in shown  # other engines' sends may wait for their receiver
    meets = tuple(usual if meet is None else meet for meet in shown)
    if is_traced:  # other sends do not block a stage, though they may last
        sent[:-1] = np.where(np.array(meets)[:, None], sent[:-1], end[:-1])
    free = _after(sent)
    ready = np.clip(ready, free, begin)
    came = np.maximum(came, ready) if is_traced else came
    turn, send, link = np.zeros_like(begin), sent - end, np.zeros_like(begin[1:])
    for stage, meet in enumerate(meets, 1):
        left = end[stage - 1]
        if meet:
            link[stage - 1] = begin[stage] - np.maximum(left, ready[stage])
            turn[stage], send[stage - 1] = ready[stage] - free[stage], sent[stage - 1] - begin[stage]
        else:
            moments = (left, ready[stage], came[stage], begin[stage], free[stage])
            link[stage - 1], turn[stage], _ = _lags(*moments, tokens, is_serial=True)
    follows, gap, floor, turn[0] = _dispatches(
        record, of_run, begin[0], end[-1], ready[0], came[0], free[0], is_traced=is_traced
    )
    turn[:, 0] = 0.0
    return Times(end - begin, turn, send, link, follows, gap, floor, meets), places


def _after(sent: Floats) -> Floats:
    """Return when each stage was done with the previous micro-batch, [S, N]."""
    return np.column_stack([np.full(len(sent), -np.inf), sent[:, :-1]])


def _lags(
    source: Floats, ready: Floats, came: Floats, begin: Floats, free: Floats, size: Floats, *, is_serial: bool
) -> tuple[Floats, Floats, Floats]:
    """Split the time before each start on one stage into the transit of its input and the turn of the stage.

    Args:
        source: when the input was sent, [N], as for all other arguments.
        ready: when the stage started to wait for its input.
        came: when it had the input; before `ready` only if the record has the arrival of a hidden input.
        begin: start of compute.
        free: when the stage was done with its last micro-batch.
        size: used to estimate the transit of hidden inputs.
        is_serial: inputs arrive one after the other.

    Returns:
        Seconds of the input's transit and of the turn, and when the input arrived.
    """
    is_known = (came < ready - _ROUNDING) & (came >= source)
    is_input, at = source >= free, source

    def after_last() -> Floats:
        return np.maximum(source, np.append(-np.inf, at[:-1])) if is_serial else source

    for _ in range(_PASSES):
        at = np.maximum.accumulate(np.where(is_input, begin, at)) if is_serial else at
        left = after_last()
        shown = is_input & np.isfinite(left)
        at = np.where(is_known, came, np.minimum(begin, left + _fit((begin - left)[shown], size[shown], size)))
        is_input = came > ready if is_known.any() else at >= ready
    at = np.where(is_input, begin, at)
    if is_serial:
        at = np.maximum.accumulate(at)
    left = after_last()
    seconds = np.where(np.isfinite(left), at - np.where(np.isfinite(left), left, 0.0), 0.0)
    host = float(np.median((begin - ready)[~is_input])) if not is_input.all() else 0.0
    turn = np.where(np.isfinite(free), np.where(is_input, np.minimum(begin, ready + host), begin) - free, 0.0)
    return seconds, turn, at


def _fit(seconds: Floats, size: Floats, sizes: Floats) -> Floats:
    """Return the seconds of a message for each of `sizes`, by a linear fit to the known ones; 0 if there are none."""
    if not len(seconds):
        return np.zeros_like(sizes)
    apart = size - size.mean()
    slope = float(apart @ seconds) / max(1e-9, float(apart @ apart))
    slope = min(max(0.0, slope), float(seconds.sum()) / max(1e-9, float(size.sum())))
    fitted: Floats = float(seconds.mean()) + slope * (sizes - size.mean())
    return fitted


def _meets(left: Floats, sent: Floats, ready: Floats) -> bool | None:
    """Return whether a stage's sends wait until their receiver is ready: they then end a constant time after that.

    Args:
        left: when a stage had computed its output, [N].
        sent: when it was done with the send.
        ready: when the receiver started to wait for it. If it nearly always waited, None may be returned.
    """
    late = ready > left + _ROUNDING
    if late.sum() < _LEAST // 2:
        return None if float(np.mean(sent > left + _ROUNDING)) > 0.5 else False
    usual = float(np.median((sent - left)[~late])) if not late.all() else 0.0
    if np.quantile((sent - ready)[late], 0.1) < usual / 2 - _ROUNDING:
        return False
    return float(np.std((sent - ready)[late])) <= float(np.std((sent - left)[late])) + _ROUNDING


def _held_until(record: RunRecord, of_run: Ints) -> Floats:
    """Return until when a send blocked stage 0 before each micro-batch; -infinity if none did."""
    waits = [record.micro_batches[place].waits for place in of_run.tolist()]
    return np.array(
        [max((w.end for w in each if w.reason == "send" and w.end > w.start), default=-math.inf) for each in waits],
        np.float64,
    )


def _limited(begin: Floats, ends: Floats, free: Floats, depth: int, stages: int) -> tuple[Ints, Floats]:
    """Return the completion that each dispatch of a traced run waited for, and its time: -1 and -infinity for none.

    An engine with a limit of micro-batches in flight dispatches a constant time after the later of two events: stage 0
    is `free`, and a completion makes room. If no limit is evident, the number of stages is assumed.
    """
    numbers = np.arange(len(begin))
    best = (numbers - stages).clip(-1) if depth <= stages else np.full(len(begin), -1)
    least = _BOUND * float(np.std((begin - free)[1:])) - _ROUNDING
    for each in {depth, depth - 1} - {0, -1}:  # the trace may count one that is just leaving
        follows = (numbers - each).clip(-1)
        lag = begin - np.maximum(ends[follows], free)
        if lag[1:].min() >= -_ROUNDING and (spread := float(np.std(lag[1:]))) < least:
            best, least = follows, spread
    return best, ends[best]


def _dispatches(
    record: RunRecord,
    of_run: Ints,
    begin: Floats,
    left: Floats,
    ready: Floats,
    came: Floats,
    free: Floats,
    *,
    is_traced: bool,
) -> tuple[Ints, Floats, Floats, Floats]:
    """Return `Times.follows`, `gap`, `floor`, and `turn` of stage 0; `left` is the end of each on the last stage."""
    batches = [record.micro_batches[place] for place in of_run.tolist()]
    count = len(batches)
    numbers = np.arange(count)
    completed = [each.completed if each.completed is not None else math.inf for each in batches]
    done = np.maximum.accumulate(np.array(completed, np.float64))
    dispatched = np.array([each.dispatched for each in batches], np.float64)
    follows = np.minimum(np.searchsorted(done, dispatched + _ROUNDING, side="right"), numbers) - 1
    source = dispatched
    if is_traced:
        follows, source = _limited(begin, np.append(left, -np.inf), free, record.depth, record.num_stages)
    _, turn, at = _lags(source, ready, came, begin, free, np.ones(count), is_serial=False)
    is_fixed = np.zeros(count, bool)
    floor = np.full(count, -np.inf)
    if not is_traced and not clients_of(record):
        arrivals = {request.request: request.arrival for request in [*record.requests, *record.crossing]}
        new = [max((arrivals.get(c.request, -math.inf) for c in each.chunks), default=-math.inf) for each in batches]
        floor = np.minimum(np.array(new, np.float64), at)
        for place, each in enumerate(batches):
            if each.waits:
                last = each.waits[-1]
                of_last = range(max(0, follows[place] - record.depth), follows[place] + 1)  # several may come at once
                ended = [at for at in of_last if abs(last.end - left[at]) <= _ROUNDING]
                is_fixed[place] = last.reason == "recovery" or not ended
                follows[place] = ended[-1] if ended else follows[place]
            elif place:
                is_fixed[place] = is_fixed[place - 1] and follows[place] == follows[place - 1]
    follows = np.where(is_fixed, -1, follows)
    follows[0], at[0] = -1, begin[0]
    return follows, np.where(follows >= 0, at - left[follows], at), floor, turn
