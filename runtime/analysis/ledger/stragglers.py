"""Stragglers: times in which one stage computed more slowly than usual, and what that cost the other stages.

A stage's usual time for a micro-batch is fitted over the run. The fit is linear in the median of the other stages'
times, the micro-batch's tokens and its decodes. So a straggler is not caused by the contents of micro-batches, an
uneven split, or a machine that slows down as a whole. A stage may be slow for most of the run if it takes its usual
time for a fifth of it. A stage that is slow throughout is `stage_imbalance`. A single micro-batch that takes several
times the usual, and a share of the whole run, is a stall, for example a first read from disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...core.micro_batch_columns import Floats, Ints, values_at
from .causes import UNEVEN_WORK, Cause
from .lanes import Lane
from .ledger import Ledger

SLOWDOWN = 1.5  # least multiple of its usual time at which a stage is a straggler
_STALL = 5.0  # least multiple of its usual time at which a single micro-batch may be a stall
_LEAST_STALL = 0.03  # minimum excess of a stall over the usual time, as a share of the run
_BLOCK = 16  # micro-batches per median
_LEAST_BLOCKS = 2
LEAST_WAITED = 0.05  # minimum wait of the other stages, as a share of the slow time
_FITS = 4  # each excludes what the previous fit found slow
_USUAL = 0.2  # minimum share of a run in which a stage takes its usual time
WAITS = [cause.code for cause in (*UNEVEN_WORK, Cause.STARVED_IN_FLIGHT)]  # for another stage


@dataclass(frozen=True, slots=True)
class Straggler:
    """A stage that was slow from `start` to `end`, in seconds on the coordinator's clock.

    Attributes:
        slowdown: ratio of its micro-batches' times to their usual times.
        waited: seconds that the other stages waited for another stage, in excess of their usual waits.
    """

    stage: int
    start: float
    end: float
    slowdown: float
    waited: float

    def summary(self, t0: float) -> dict[str, Any]:
        """Return the straggler's entry in `summary.json`, with times in seconds since `t0`."""
        return {
            "stage": self.stage,
            "start": self.start - t0,
            "end": self.end - t0,
            "slowdown": self.slowdown,
            "waited": self.waited,
        }


def find_stragglers(ledger: Ledger) -> list[Straggler]:
    """Return the stragglers of a run in time order; none for a pipeline with one stage."""
    lanes = ledger.lanes
    if len(lanes) < 2:
        return []
    places = common_places(lanes)
    if len(places[0]) < _BLOCK * _LEAST_BLOCKS:
        return []
    seconds, held = columns_of(ledger, lanes, places)
    found = []
    for stage, (lane, place) in enumerate(zip(lanes, places, strict=True)):
        usual = fit_usual(stage, seconds, held).of(stage, seconds, held)
        slow = list(_slow(seconds[stage] / usual))
        stalled = np.flatnonzero(stalls(seconds[stage], usual, ledger.span_seconds))
        for run in np.split(stalled, np.flatnonzero(np.diff(stalled) > 1) + 1) if len(stalled) else ():
            first, end = int(run[0]), int(run[-1]) + 1
            if not any(a - _BLOCK < first < b + _BLOCK for a, b, _ in slow):
                slow.append((first, end, float(seconds[stage, first:end].sum() / usual[first:end].sum())))
        for first, end, slowdown in slow:
            begin, until = float(lane.begin[place[first]]), float(lane.end[place[end - 1]])
            found.append((stage, begin, until, slowdown))
    found.sort(key=lambda each: each[1])
    usual_waits = _usual_waits(ledger, [(start, end) for _, start, end, _ in found])
    stragglers = [
        Straggler(stage, start, end, slowdown, _waited(ledger, stage, start, end, usual_waits))
        for stage, start, end, slowdown in found
    ]
    return [each for each in stragglers if each.waited >= LEAST_WAITED * (each.end - each.start)]


def stalls(seconds: Floats, usual: Floats, whole: float) -> npt.NDArray[np.bool_]:
    """Return a mask of the micro-batches that are stalls, in the shape of `seconds`; `whole`: seconds of the run."""
    found: npt.NDArray[np.bool_] = (seconds >= _STALL * usual) & (seconds - usual >= _LEAST_STALL * whole)
    return found


def common_places(lanes: Sequence[Lane]) -> list[Ints]:
    """Return the indices, in each lane, of the micro-batches that all of these stages computed."""
    rows = lanes[0].row
    for lane in lanes[1:]:
        rows = np.intersect1d(rows, lane.row)
    return [lane.places(rows) for lane in lanes]


def columns_of(ledger: Ledger, lanes: Sequence[Lane], places: Sequence[Ints]) -> tuple[Floats, Floats]:
    """Return the stages' times and the contents of the micro-batches at these places of the lanes.

    Returns:
        Seconds [stages, N]; tokens and decodes [N, 2].
    """
    seconds = np.stack([lane.seconds[place] for lane, place in zip(lanes, places, strict=True)])
    of_run = ledger.micro_batches.places(lanes[0].micro_batch[places[0]])
    held = [values_at(column, of_run) for column in (ledger.micro_batches.tokens, ledger.micro_batches.decodes)]
    return seconds, np.stack(held, axis=1).astype(np.float64)


@dataclass(frozen=True, slots=True)
class Usual:
    """A stage's usual time for a micro-batch: linear in its features with `factors`, but at least `least` seconds."""

    factors: Floats
    least: float

    def of(self, stage: int, seconds: Floats, held: Floats) -> Floats:
        """Return the usual seconds [N] for micro-batches with times `seconds` [stages, N] and sizes `held` [N, 2]."""
        return np.maximum(_features(stage, seconds, held) @ self.factors, self.least)


def fit_usual(stage: int, seconds: Floats, held: Floats) -> Usual:
    """Fit a stage's usual times by relative error, excluding slow micro-batches.

    Args:
        stage: the stage's number.
        seconds: the stages' times for micro-batches, [stages, N].
        held: the micro-batches' tokens and decodes, [N, 2].
    """
    own, features = seconds[stage], _features(stage, seconds, held)
    least = max(float(np.median(own)) / 16, 1e-9)
    is_usual, factors = own > 0, np.zeros(features.shape[1])
    for _ in range(_FITS):
        if not is_usual.any():
            break
        weights = 1 / own[is_usual]
        factors, *_ = np.linalg.lstsq(features[is_usual] * weights[:, None], np.ones(len(weights)), rcond=None)
        fit = np.maximum(features @ factors, least)
        level = usual_level(own[is_usual] / fit[is_usual])
        is_usual = (own > 0) & (own < SLOWDOWN * level * fit)
    return Usual(factors, least)


def usual_level(ratios: Floats) -> float:
    """Return the usual ratio of a stage's times to the fitted ones.

    It is the median, or the 20% quantile if the median is slow compared with it.
    """
    low, median = np.quantile(ratios, [_USUAL, 0.5]).tolist()
    return float(median if median < SLOWDOWN * low else low)


def _features(stage: int, seconds: Floats, held: Floats) -> Floats:
    """Return the regressors [N, 4] of a stage's time: 1, the median of the other stages' times, tokens and decodes."""
    others = np.median(np.delete(seconds, stage, axis=0), axis=0)
    return np.column_stack([np.ones(len(others)), others, held])


def _slow(ratio: Floats) -> Iterator[tuple[int, int, float]]:
    """Yield the ranges of a ratio [N] in which medians of blocks are at least `SLOWDOWN` times the usual.

    Each is its first index, its end, and its ratio to the usual.
    """
    num_blocks = len(ratio) // _BLOCK
    medians = np.median(ratio[: num_blocks * _BLOCK].reshape(num_blocks, _BLOCK), axis=1)
    usual = usual_level(medians)
    is_slow = np.concatenate([[False], medians >= SLOWDOWN * usual, [False]])
    first, end = (np.flatnonzero(is_slow[1:] & ~is_slow[:-1]), np.flatnonzero(is_slow[:-1] & ~is_slow[1:]))
    for a, b in zip(first.tolist(), end.tolist(), strict=True):
        if b - a >= _LEAST_BLOCKS:
            yield a * _BLOCK, b * _BLOCK, float(np.median(ratio[a * _BLOCK : b * _BLOCK]) / usual)


def _waits_within(ledger: Ledger, stage: int, start: float, end: float) -> float:
    """Return the seconds within [start, end) that a stage waited for another one."""
    idle = ledger.idle_columns[stage]
    overlap = np.minimum(idle.end, end) - np.maximum(idle.start, start)
    return float(overlap[np.isin(idle.cause, WAITS) & (overlap > 0)].sum())


def _micro_batches_within(ledger: Ledger, stage: int, start: float, end: float) -> int:
    """Return how many micro-batches a stage began within [start, end)."""
    first, after = np.searchsorted(ledger.lanes[stage].begin, [start, end])
    return int(after - first)


def _usual_waits(ledger: Ledger, slow: list[tuple[float, float]]) -> list[float]:
    """Return the seconds per micro-batch that each stage waits for another one while none is slow."""
    usual = []
    for stage in range(ledger.num_stages):
        waits, count, after = 0.0, 0, ledger.t0
        for start, end in [*slow, (ledger.t1, ledger.t1)]:
            if start > after:
                waits += _waits_within(ledger, stage, after, start)
                count += _micro_batches_within(ledger, stage, after, start)
            after = max(after, end)
        usual.append(waits / count if count else 0.0)
    return usual


def _waited(ledger: Ledger, stage: int, start: float, end: float, usual: list[float]) -> float:
    """Return the seconds that all stages but one waited in [start, end), in excess of their usual waits."""
    extra = (
        _waits_within(ledger, other, start, end) - usual[other] * _micro_batches_within(ledger, other, start, end)
        for other in range(ledger.num_stages)
        if other != stage
    )
    return max(0.0, sum(extra))
