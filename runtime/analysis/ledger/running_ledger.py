"""The ledger of an unbounded run: busy and idle seconds by stage and cause, in bounded memory."""

from __future__ import annotations

import math

import numpy as np

from ...core.micro_batch_columns import Floats
from ...core.run_record import RunRecord
from .causes import CAUSES, Cause
from .compute_shares import ComputeSums
from .lanes import Lane
from .ledger import Ledger
from .recovery import lost_since, was_dropped


class RunningLedger:
    """Counts a record's finished micro-batches incrementally and discards them from the record.

    The cause of a gap may be as many micro-batches back as were in flight. The record keeps that many spans per stage,
    which the next increment does not count again. Faults are kept too, since they are few.

    Micro-batches dropped by a fault are counted with the next completed one.

    Attributes:
        start: the run's start in seconds: the first arrival or the first compute; infinite before anything was counted.
        end: end of the last compute that was counted.
        ends: the same by stage.
        busy: seconds by stage.
        compute: compute sums by stage and phase.
        idle: seconds until the stage's own end, [stages, causes]; plus its busy seconds, they equal its end - `start`.

    Args:
        depth: maximum micro-batches in flight.
    """

    def __init__(self, depth: int) -> None:
        self._overlap = depth + 2
        self._counted = 0  # leading micro-batches of the record that have been counted
        self.start = math.inf
        self.end = -math.inf
        self.busy: Floats = np.zeros(0)
        self.idle: Floats = np.zeros((0, len(CAUSES)))
        self.ends: Floats = np.zeros(0)
        self.compute = ComputeSums()

    def count(self, record: RunRecord) -> tuple[Ledger, int] | None:
        """Count the completed micro-batches of `record` whose spans have all arrived.

        Returns:
            The ledger of all counted micro-batches still in the record, and the index of the first new one; None if
            none is new.
        """
        seen = _computed_by_all(record)
        done = first = self._counted
        for place, micro_batch in enumerate(record.micro_batches[first:], first + 1):
            if micro_batch.micro_batch > seen:
                break
            if micro_batch.completed is not None:
                done = place
            elif not was_dropped(micro_batch, record.faults):
                break
        if done == first:
            return None
        micro_batches = record.micro_batches[:done]
        last = micro_batches[-1].micro_batch
        spans = [span for span in record.spans if span.micro_batch <= last]
        if len({span.stage for span in spans}) < record.standing_stages:  # a fault ended the first micro-batches
            return None
        self._counted = done
        is_first = self.start == math.inf
        requests = record.requests if is_first else []  # the first arrival is the run's start
        part = RunRecord(record.num_stages, record.num_blocks, micro_batches, spans, requests, faults=record.faults)
        ledger = Ledger(part)
        if is_first:
            self.start = ledger.t0
            self.busy = np.zeros(record.num_stages)
            self.idle = np.zeros((record.num_stages, len(CAUSES)))
        self.end = ledger.t1
        ends = self.ends if len(self.ends) else np.full(record.num_stages, self.start)
        self.ends = np.array([lane.end.max(initial=end) for end, lane in zip(ends, ledger.lanes, strict=True)])
        for stage, (lane, idle) in enumerate(zip(ledger.lanes, ledger.idle_columns, strict=True)):
            place = first_place(ledger, lane, first)
            is_new = idle.place >= place
            self.idle[stage] += np.bincount(idle.cause[is_new], idle.seconds[is_new], len(CAUSES))
            self.busy[stage] += lane.seconds[place:].sum()
        self.compute.add(record.floors, micro_batches, ledger, first)
        for stage in range(record.standing_stages, record.num_stages):  # lost stages
            begun = min(self.end, max(self.ends[stage], lost_since(record.faults, stage)))
            self.idle[stage, Cause.FILL_DRAIN.code] += begun - self.ends[stage]
            self.idle[stage, Cause.RECOVERY.code] += self.end - begun
            self.ends[stage] = self.end
        return ledger, first

    def drop(self, record: RunRecord) -> None:
        """Discard entries of `record` that have been counted and that no later gap refers to."""
        keep = self._counted - self._overlap
        if record.faults:
            keep = min(keep, self._first_needed(record))
        if keep > 0:
            first = record.micro_batches[keep].micro_batch
            record.micro_batches = record.micro_batches[keep:]
            record.spans = [span for span in record.spans if span.micro_batch >= first]
            self._counted -= keep

    def _first_needed(self, record: RunRecord) -> int:
        """Return the index of the first micro-batch to keep, so that each stage has all that later gaps may need.

        Micro-batches that a stage did not compute because of a fault do not count.
        """
        computed = {(span.stage, span.micro_batch) for span in record.spans}
        missing = [self._overlap] * record.standing_stages
        for place in range(self._counted - 1, -1, -1):
            number = record.micro_batches[place].micro_batch
            missing = [left - ((stage, number) in computed) for stage, left in enumerate(missing)]
            if max(missing) <= 0:
                return place
        return 0


def first_place(ledger: Ledger, lane: Lane, first: int) -> int:
    """Return the index in a ledger's lane of the stage's first micro-batch at or after index `first`."""
    return int(np.count_nonzero(lane.micro_batch < ledger.micro_batches.micro_batch[first]))


def _computed_by_all(record: RunRecord) -> int:
    """Return the last micro-batch whose spans have arrived from all stages; -1 if there is none.

    The last stage's span may arrive before an earlier stage's.
    """
    last = [-1] * record.standing_stages
    unseen = len(last)
    for span in reversed(record.spans):
        if span.stage >= len(last):
            continue
        if last[span.stage] < 0:
            last[span.stage] = span.micro_batch
            unseen -= 1
            if not unseen:
                break
    return min(last)
