"""Stragglers: times in which one stage computed more slowly than it usually does, and what that cost the others.

A stage's usual time of a micro-batch is fitted over the run: linear in the median of the other stages' times, the
micro-batch's tokens and its decodes. So neither what micro-batches hold, nor an uneven split, nor a machine that slows
down as a whole makes a straggler. A stage that is slow from the run's begin to its end is `stage_imbalance`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.micro_batch_columns import Floats, values_at
from .causes import UNEVEN_WORK, Cause
from .ledger import Ledger

SLOWDOWN = 1.5  # times the usual, from which on a stage is a straggler
_BLOCK = 16  # micro-batches whose median counts
_LEAST_BLOCKS = 2
_LEAST_WAITED = 0.05  # of its time; whom nobody waits for is none
_FITS = 4  # each leaves out what was slow by the one before
_WAITS = [cause.code for cause in (*UNEVEN_WORK, Cause.STARVED_IN_FLIGHT)]  # for another stage


@dataclass(frozen=True, slots=True)
class Straggler:
    """A stage that was slow from `start` to `end`, in seconds on the coordinator's clock.

    Attributes:
        slowdown: what its micro-batches took over what they usually take.
        waited: seconds for which the other stages waited for one, beyond their usual for as many micro-batches.
    """

    stage: int
    start: float
    end: float
    slowdown: float
    waited: float

    def summary(self, t0: float) -> dict[str, Any]:
        """The straggler as `summary.json` names it, with seconds since `t0`."""
        return {
            "stage": self.stage,
            "start": self.start - t0,
            "end": self.end - t0,
            "slowdown": self.slowdown,
            "waited": self.waited,
        }


def find_stragglers(ledger: Ledger) -> list[Straggler]:
    """Return the stragglers of a run in order of time; none of a pipeline with one stage."""
    lanes = ledger.lanes
    if len(lanes) < 2:
        return []
    rows = lanes[0].row
    for lane in lanes[1:]:
        rows = np.intersect1d(rows, lane.row)
    if len(rows) < _BLOCK * _LEAST_BLOCKS:
        return []
    places = [lane.places(rows) for lane in lanes]
    seconds = np.stack([lane.seconds[place] for lane, place in zip(lanes, places, strict=True)])  # [stages, N]
    of_run = ledger.micro_batches.places(lanes[0].micro_batch[places[0]])
    held = [values_at(column, of_run) for column in (ledger.micro_batches.tokens, ledger.micro_batches.decodes)]
    found = []
    for stage, (lane, place) in enumerate(zip(lanes, places, strict=True)):
        others = np.median(np.delete(seconds, stage, axis=0), axis=0)
        usual = _usual(seconds[stage], np.stack([np.ones(len(rows)), others, *held], axis=1))
        for first, end, slowdown in _slow(seconds[stage] / usual):
            begin, until = float(lane.begin[place[first]]), float(lane.end[place[end - 1]])
            found.append((stage, begin, until, slowdown))
    found.sort(key=lambda each: each[1])
    usual_waits = _usual_waits(ledger, [(start, end) for _, start, end, _ in found])
    stragglers = [
        Straggler(stage, start, end, slowdown, _waited(ledger, stage, start, end, usual_waits))
        for stage, start, end, slowdown in found
    ]
    return [each for each in stragglers if each.waited >= _LEAST_WAITED * (each.end - each.start)]


def _usual(seconds: Floats, features: Floats) -> Floats:
    """Fit the seconds [N] to features [N, F], by relative error and without what is slow; return the fit [N]."""
    is_usual = seconds > 0
    least = float(np.median(seconds)) / 16
    fit = seconds
    for _ in range(_FITS):
        if not is_usual.any():
            break
        weights = 1 / seconds[is_usual]
        factors, *_ = np.linalg.lstsq(features[is_usual] * weights[:, None], np.ones(len(weights)), rcond=None)
        fit = np.maximum(features @ factors, max(least, 1e-9))
        level = float(np.median(seconds[is_usual] / fit[is_usual]))
        is_usual = (seconds > 0) & (seconds < SLOWDOWN * level * fit)
    return fit


def _slow(ratio: Floats) -> Iterator[tuple[int, int, float]]:
    """Stretches of a ratio [N] where medians of blocks are `SLOWDOWN` times the usual or more: first, end, times."""
    num_blocks = len(ratio) // _BLOCK
    medians = np.median(ratio[: num_blocks * _BLOCK].reshape(num_blocks, _BLOCK), axis=1)
    usual = np.median(medians)
    is_slow = np.concatenate([[False], medians >= SLOWDOWN * usual, [False]])
    first, end = (np.flatnonzero(is_slow[1:] & ~is_slow[:-1]), np.flatnonzero(is_slow[:-1] & ~is_slow[1:]))
    for a, b in zip(first.tolist(), end.tolist(), strict=True):
        if b - a >= _LEAST_BLOCKS:
            yield a * _BLOCK, b * _BLOCK, float(np.median(ratio[a * _BLOCK : b * _BLOCK]) / usual)


def _waits_within(ledger: Ledger, stage: int, start: float, end: float) -> float:
    """Seconds within [start, end) for which a stage waited for another one."""
    idle = ledger.idle_columns[stage]
    overlap = np.minimum(idle.end, end) - np.maximum(idle.start, start)
    return float(overlap[np.isin(idle.cause, _WAITS) & (overlap > 0)].sum())


def _micro_batches_within(ledger: Ledger, stage: int, start: float, end: float) -> int:
    """How many micro-batches a stage began within [start, end)."""
    first, after = np.searchsorted(ledger.lanes[stage].begin, [start, end])
    return int(after - first)


def _usual_waits(ledger: Ledger, slow: list[tuple[float, float]]) -> list[float]:
    """Seconds for which each stage waits for another one by micro-batch, without the times in which any is slow."""
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
    """Seconds for which all but one stage waited within [start, end), beyond their usual waits by micro-batch."""
    extra = (
        _waits_within(ledger, other, start, end) - usual[other] * _micro_batches_within(ledger, other, start, end)
        for other in range(ledger.num_stages)
        if other != stage
    )
    return max(0.0, sum(extra))
