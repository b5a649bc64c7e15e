"""Time between a run's stages, learned from its spans: host overheads and links."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...core.least_squares import non_negative
from ...core.micro_batch_columns import Floats
from ...core.run_record import RunRecord
from ...simulation.cost.operators import HostTimes
from .learned_operators import LinkSeconds
from .observations import Observations

_WAITING = 5  # percentile of result delays: results that the coordinator was waiting for
_PASSES = 3  # of separating waits for an input from waits for a stage's host
_LONGEST_TURN = 0.02  # longest turn of the coordinator from a result to the next dispatch, in seconds


@dataclass(frozen=True, slots=True)
class LearnedHost:
    """Seconds that a run spent between stages, by micro-batch. NaN: hidden behind something longer.

    Attributes:
        dispatch: from a result until the first stage, which was free, starts the next micro-batch, [n].
        result: from the end of the last stage until the coordinator has the result, [n].
        turnaround: from a stage's previous micro-batch to the start of this one, whose input was ready, [n, S].
        sends: from the end of a stage to the start of the waiting next stage, relative to `links`, [n, S - 1].
        links: typical seconds of each link.
        times: the means.
    """

    dispatch: Floats
    result: Floats
    turnaround: Floats
    sends: Floats
    links: tuple[LinkSeconds, ...]
    times: HostTimes

    @property
    def least_result(self) -> float:
        """Seconds until a waiting coordinator has a result."""
        known = self.result[np.isfinite(self.result)]
        return float(np.percentile(known, _WAITING)) if len(known) else 0.0

    @classmethod
    def of(cls, record: RunRecord, seen: Observations) -> LearnedHost:
        """Learn from the spans and the dispatches of a run."""
        begins, ends = seen.begin_times, seen.end_times
        n, stages = begins.shape
        free = np.vstack([np.full(stages, -np.inf), ends[:-1]])
        turnaround, sends = np.full((n, stages), np.nan), np.full((n, stages - 1), np.nan)
        dispatch = np.full(n, np.nan)
        is_input = _waits_for_input(seen.dispatched, free[:, 0], begins[:, 0])
        dispatch[is_input] = (begins[:, 0] - seen.dispatched)[is_input] + _turn(record)
        turnaround[~is_input, 0] = (begins - free)[~is_input, 0]
        links, rows = [], np.array([shape.rows for shape in seen.shapes], np.float64)
        for stage in range(1, stages):
            given, waits = ends[:, stage - 1], begins[:, stage] - ends[:, stage - 1]
            is_input = _waits_for_input(given, free[:, stage], begins[:, stage])
            link = _fit_link(rows[is_input], waits[is_input])
            links.append(link)
            sends[is_input, stage - 1] = waits[is_input] / np.maximum(1e-9, link.message + link.row * rows[is_input])
            turnaround[~is_input, stage] = (begins - free)[~is_input, stage]
        result = np.maximum(seen.completed - ends[:, -1], 0.0)
        turn = _mean(turnaround)
        if not np.isfinite(turnaround).any():  # no stage ever had its next input ready
            turn = max(0.0, float(np.median(seen.ready_times[1:] - ends[:-1]))) if n > 1 else 0.0
        return cls(
            dispatch,
            result,
            turnaround,
            sends,
            tuple(links),
            HostTimes(dispatch=_mean(dispatch), result=_mean(result), turnaround=turn),
        )


def _turn(record: RunRecord) -> float:
    """Return the coordinator's median seconds from a result to the dispatch that it made room for."""
    done = np.sort([m.completed for m in record.micro_batches if m.completed is not None])
    at = np.array([m.dispatched for m in record.micro_batches])
    place = np.searchsorted(done, at, side="right") - 1
    turns = (at - done[np.maximum(place, 0)])[place >= 0] if len(done) else np.empty(0)
    turns = turns[turns < _LONGEST_TURN]
    return float(np.median(turns)) if len(turns) else 0.0


def _waits_for_input(given: Floats, free: Floats, begin: Floats) -> npt.NDArray[np.bool_]:
    """Return a mask of the micro-batches for whose input a stage, `free` from then on, waited.

    The input is in transit since `given`. If the stage did not wait for it, its host was not ready.
    """
    is_input = given >= free
    for _ in range(_PASSES):
        if not is_input.any():
            break
        is_input = given + np.median((begin - given)[is_input]) >= free
    return is_input


def _fit_link(rows: Floats, seconds: Floats) -> LinkSeconds:
    """Fit the seconds per message and per row to typical samples, scaled to preserve the samples' sum."""
    if not len(rows):
        return LinkSeconds(0.0, 0.0)
    design = np.stack([np.ones(len(rows)), rows], axis=1)
    predicted = np.full(len(rows), max(1e-9, float(np.median(seconds))))
    found = np.array([predicted[0], 0.0])
    for _ in range(8):
        weight = np.minimum(1.0, 1.0 / np.maximum(np.abs(seconds / predicted - 1), 1e-9)) / predicted**2
        weighted = design * weight[:, None]
        found = non_negative(weighted.T @ design, weighted.T @ seconds)
        predicted = np.maximum(design @ found, 1e-9)
    found = found * max(0.0, float(seconds.sum())) / float(predicted.sum())
    return LinkSeconds(float(found[0]), float(found[1]))


def _mean(samples: Floats) -> float:
    known = samples[np.isfinite(samples)]
    return max(0.0, float(known.mean())) if len(known) else 0.0
