"""MFU and memory-bandwidth utilization of each stage, by phase."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...core.compute_share import ComputeShare
from ...core.micro_batch_columns import Floats
from ...core.micro_batch_sizes import PHASES, Sizes
from ...core.run_record import MicroBatchRecord, RunRecord
from ...core.stage_floor import StageFloor
from .ledger import Ledger


class ComputeSums:
    """Accumulates compute by stage and phase over one or several runs, to derive the shares."""

    def __init__(self) -> None:
        # Micro-batches, seconds, roofline seconds, FLOPs, bytes, and the FLOPs and bytes possible at peak rates.
        self._sums: Floats = np.zeros((0, len(PHASES), 7))

    def add(
        self, floors: Sequence[StageFloor], micro_batches: Sequence[MicroBatchRecord], ledger: Ledger, first: int = 0
    ) -> None:
        """Add a run's micro-batches, starting at index `first`.

        Args:
            floors: each stage's floor; if empty (unknown machines), nothing is added.
            micro_batches: the run's micro-batches.
            ledger: the run's ledger.
            first: index of the first micro-batch that counts.
        """
        if not floors or first >= len(micro_batches):
            return
        if len(self._sums) < len(floors):
            more = np.zeros((len(floors) - len(self._sums), *self._sums.shape[1:]))
            self._sums = np.concatenate([self._sums, more])
        sizes = Sizes.of_records(micro_batches[first:])
        for own, floor, lane in zip(self._sums, floors, ledger.lanes, strict=False):
            place = ledger.micro_batches.places(lane.micro_batch) - first
            place, seconds = place[place >= 0], lane.seconds[place >= 0]
            flops, moved = sizes.flops(floor)[place], sizes.bytes(floor)[place]
            by_flops, by_bytes = flops / floor.flops_per_s, moved / floor.bytes_per_s
            given = floor.flops_per_s * seconds, floor.bytes_per_s * seconds
            columns = (np.ones(len(place)), seconds, np.maximum(by_flops, by_bytes), flops, moved, *given)
            phase = sizes.phase[place]
            own += np.array([np.bincount(phase, column, len(PHASES)) for column in columns]).T

    def shares(self) -> list[ComputeShare]:
        """Return the shares of each stage and phase that has compute time."""
        found = []
        for stage, phases in enumerate(self._sums.tolist()):
            for phase, (count, seconds, least, flops, moved, tops, traffic) in zip(PHASES, phases, strict=True):
                if seconds > 0:
                    rates = 1e-12 * tops / seconds, 1e-9 * traffic / seconds
                    shares = flops / tops, moved / traffic
                    found.append(ComputeShare(stage, phase, round(count), seconds, least, *shares, *rates))
        return found


def compute_shares(*runs: tuple[RunRecord, Ledger]) -> list[ComputeShare]:
    """Return the shares of each stage and phase over one run, or over all replicas of a fleet.

    It is empty if the machines are unknown: for traces, old run folders, and stages with few weights.
    """
    sums = ComputeSums()
    for record, ledger in runs:
        sums.add(record.floors, record.micro_batches, ledger)
    return sums.shares()
