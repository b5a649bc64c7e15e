"""The path of each completed micro-batch through the pipeline as timestamps, and what its dispatch waited for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from ...core.micro_batch_columns import Floats, Ints
from ...core.run_record import MicroBatchRecord, RunRecord
from .lanes import Lane


class StageEvent(IntEnum):
    """What happens to a micro-batch on one stage, in order of time."""

    INPUT = 0  # its input arrived, if the stage was still busy; else the end on the previous stage
    FREE = 1  # the stage had computed its previous micro-batch
    SENT = 2  # stage 0: the send of the previous micro-batch was done too
    BEGIN = 3
    END = 4


class WaitClass(IntEnum):
    """What a request that is not in flight waits for while the coordinator waits."""

    BUSY = 0  # micro-batches occupy all slots, or the policy makes the request wait its turn
    NO_ROOM = 1  # the same, but no prompt has been computed since the last dispatch, though requests waited
    KV_TRANSFER = 2
    RECOVERY = 3


@dataclass(frozen=True, slots=True)
class MicroBatchPaths:
    """Completed micro-batches (one row each, in order of completion) and their timestamps, in seconds.

    Attributes:
        micro_batch: [R] their numbers.
        place: [R] their indices in the record.
        dispatched: [R].
        completed: [R] when the coordinator had their result; ascending.
        points: [R, stages, len(StageEvent)], ascending along a row and never beyond `completed`.
        lane_place: [R, stages] index in the stage's lane; -1 if the stage did not compute it.
    """

    micro_batch: Ints
    place: Ints
    dispatched: Floats
    completed: Floats
    points: Floats
    lane_place: Ints

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        num_stages: int = self.points.shape[1]
        return num_stages

    @classmethod
    def of(cls, record: RunRecord, lanes: Sequence[Lane]) -> MicroBatchPaths:
        """Derive them from a record. Micro-batches dropped by a fault have no row.

        If the record has no completion times, each micro-batch counts as completed at its end on the last stage.
        """
        completed = np.array([np.nan if m.completed is None else m.completed for m in record.micro_batches], np.float64)
        numbers = np.array([m.micro_batch for m in record.micro_batches], np.int64)
        if np.isnan(completed).all():
            completed = np.append(lanes[-1].end, np.nan)[_in_lane(lanes[-1], numbers)[2]]
        known = np.flatnonzero(~np.isnan(completed))
        kept = known[np.argsort(completed[known], kind="stable")]
        numbers, completed = numbers[kept], completed[kept]
        dispatched = np.array([m.dispatched for m in record.micro_batches], np.float64)[kept]
        points, places = _points(record, lanes, numbers, dispatched)
        flat = points.reshape(len(kept), len(lanes) * len(StageEvent))
        flat = np.minimum(np.maximum.accumulate(flat, axis=1), completed[:, None])
        return cls(numbers, kept, dispatched, completed, flat.reshape(points.shape), places)


def _in_lane(lane: Lane, numbers: Ints) -> tuple[Ints, Ints, Ints]:
    """Return the lane's sorting order, its sorted micro-batches, and the lane index of each of `numbers`, else -1."""
    order = np.argsort(lane.micro_batch, kind="stable")
    known = lane.micro_batch[order]
    at = np.searchsorted(known, numbers)
    found = np.append(known, -1)[at] == numbers
    return order, known, np.where(found, np.append(order, -1)[at], -1)


def _points(record: RunRecord, lanes: Sequence[Lane], numbers: Ints, dispatched: Floats) -> tuple[Floats, Ints]:
    """Return each micro-batch's points on each stage, not yet made ascending, and its indices in the lanes."""
    points = np.empty((len(numbers), len(lanes), len(StageEvent)))
    places = np.full((len(numbers), len(lanes)), -1)
    stage_of = np.array([span.stage for span in record.spans], np.int64)
    span_of = np.array([span.micro_batch for span in record.spans], np.int64)
    inputs = np.array([span.input for span in record.spans], np.float64)
    upstream_end = dispatched
    for stage, lane in enumerate(lanes):
        order, known, place = _in_lane(lane, numbers)
        own = np.flatnonzero(stage_of == stage)
        came = np.empty(len(lane.micro_batch))
        came[order[np.searchsorted(known, span_of[own])]] = inputs[own]
        is_here = place >= 0
        free = np.append(-np.inf, lane.end)[np.maximum(place, 0)]  # of the micro-batch before it in the lane
        sent = np.maximum(free, np.append(-np.inf, lane.sent)[np.maximum(place, 0)]) if stage == 0 else free
        at = np.where(is_here, np.append(came, np.inf)[place], np.inf)
        points[:, stage, StageEvent.INPUT] = np.where(at < free, at, upstream_end)
        points[:, stage, StageEvent.FREE] = free
        points[:, stage, StageEvent.SENT] = sent
        points[:, stage, StageEvent.BEGIN] = np.append(lane.begin, 0.0)[place]
        points[:, stage, StageEvent.END] = np.append(lane.end, 0.0)[place]
        points[~is_here, stage] = upstream_end[~is_here, None]
        # A stage is free before it begins a micro-batch, but the clocks of stages differ a little.
        begin = points[:, stage, StageEvent.BEGIN]
        np.minimum(
            points[:, stage, : StageEvent.BEGIN],
            np.maximum(begin, upstream_end)[:, None],
            out=points[:, stage, : StageEvent.BEGIN],
        )
        upstream_end = np.maximum(upstream_end, points[:, stage, StageEvent.END])
        places[:, stage] = place
    return points, places


class CoordinatorWaits:
    """The coordinator's cumulative wait time by `WaitClass`.

    Args:
        micro_batches: the record's micro-batches in order, including those dropped by a fault.
    """

    def __init__(self, micro_batches: Sequence[MicroBatchRecord]) -> None:
        start: list[float] = []
        end: list[float] = []
        wait_class: list[int] = []
        holds_prompts_back = False
        for micro_batch in micro_batches:
            for wait in micro_batch.waits:
                start.append(wait.start)
                end.append(wait.end)
                if wait.reason == "recovery":
                    wait_class.append(WaitClass.RECOVERY)
                elif wait.reason == "kv_transfer":
                    wait_class.append(WaitClass.KV_TRANSFER)
                elif wait.reason == "kv_full" or holds_prompts_back:
                    wait_class.append(WaitClass.NO_ROOM)
                else:
                    wait_class.append(WaitClass.BUSY)
            holds_prompts_back = not micro_batch.chunks and micro_batch.num_waiting > 0
        edges = np.array([start, end], np.float64).T.ravel()
        self._times = np.maximum.accumulate(edges) if len(edges) else np.zeros(1)
        seconds = np.zeros((len(self._times), len(WaitClass)))
        if len(edges):
            seconds[1::2][np.arange(len(start)), wait_class] = self._times[1::2] - self._times[::2]
        self._until = np.cumsum(seconds, axis=0)

    def until(self, times: Floats, *classes: WaitClass) -> Floats:
        """Return the seconds of waits of these classes until each of `times`."""
        seconds: Floats = np.interp(times, self._times, self._until[:, list(classes)].sum(axis=1))
        return seconds
