"""Each stage's compute timeline, as arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...core.messages import Span
from ...core.micro_batch_columns import Floats, Ints


@dataclass(frozen=True, slots=True)
class Lane:
    """The micro-batches of one stage, one entry each, in time order; times in seconds.

    `row` indexes the run's micro-batches, sorted by their numbers. `sent`: when the send of its output was done.
    """

    micro_batch: Ints
    row: Ints
    begin: Floats
    end: Floats
    sent: Floats

    @property
    def seconds(self) -> Floats:
        """How long each micro-batch took on the stage."""
        return self.end - self.begin

    def places(self, row: Ints) -> Ints:
        """Return the index in this lane of each of these rows, -1 if the stage did not compute it."""
        place = np.full(max(int(self.row.max(initial=-1)), int(row.max(initial=-1))) + 2, -1)
        place[self.row] = np.arange(len(self.row))
        return place[row]


def leaving_lane(lanes: Sequence[Lane], lost: Sequence[float]) -> Lane:
    """Return the micro-batches as they left the pipeline.

    They are the last stage's; after stages were lost, those of the stage that is last from then on.

    Args:
        lanes: each stage's lane.
        lost: when each stage was lost, in seconds; infinity if it never was.
    """
    if all(since == math.inf for since in lost):
        return lanes[-1]
    parts = []
    for lane, next_lost in zip(lanes, [*lost[1:], -math.inf], strict=True):
        own = lane.begin >= next_lost
        parts.append([column[own] for column in (lane.micro_batch, lane.row, lane.begin, lane.end, lane.sent)])
    order = np.argsort(np.concatenate([part[2] for part in parts]), kind="stable")
    return Lane(*(np.concatenate(columns)[order] for columns in zip(*parts, strict=True)))


def lanes_of(spans: Sequence[Span], num_stages: int) -> list[Lane]:
    """Return the lane of each stage. Overlaps within rounding are removed."""
    stage = np.array([s.stage for s in spans], np.int64)
    micro_batch = np.array([s.micro_batch for s in spans], np.int64)
    begin = np.array([s.begin for s in spans], np.float64)
    end = np.array([s.end for s in spans], np.float64)
    sent = np.array([s.sent for s in spans], np.float64)
    assert not len(spans) or (stage.min() >= 0 and stage.max() < num_stages), "a span of a stage that does not exist"
    numbers = np.unique(micro_batch)
    lanes = []
    for s in range(num_stages):
        own = np.flatnonzero(stage == s)
        own = own[np.lexsort((micro_batch[own], end[own], begin[own]))]
        begins, ends, computed = begin[own], end[own], micro_batch[own]
        tolerance = 1e-6 + 1e-9 * (float(ends.max() - begins.min()) if len(own) else 0.0)
        assert len(np.unique(computed)) == len(computed), f"stage {s} computed a micro-batch twice"
        assert (ends >= begins - tolerance).all(), f"stage {s} ended a micro-batch before it began"
        ends = np.maximum.accumulate(np.maximum(ends, begins))
        assert (begins[1:] >= ends[:-1] - tolerance).all(), f"stage {s} computed two micro-batches at once"
        begins[1:] = np.maximum(begins[1:], ends[:-1])
        row = np.searchsorted(numbers, computed)
        lanes.append(Lane(computed, row, begins, np.maximum(ends, begins), sent[own]))
    return lanes
