"""How much of its machine's rates each stage reaches, by phase: MFU, and the share of memory bandwidth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from ..core.micro_batch_columns import Floats
from ..core.micro_batch_sizes import PHASES, Sizes
from ..core.run_record import MicroBatchRecord, RunRecord
from ..core.stage_floor import StageFloor
from .ledger import Ledger


class ComputeShare(msgspec.Struct, frozen=True, array_like=True):
    """The compute of a stage in micro-batches of one phase: `prefill` (chunks only), `decode` (decodes only), `mixed`.

    `seconds` of compute, of which `floor_seconds` would do at the machine's best rates. `mfu`: FLOPs over those that
    the ranks' GEMM rate would give in that time. `bandwidth_share`: the same of the bytes that must be read. The rates
    are those of the stage's ranks together.
    """

    stage: int
    phase: str
    micro_batches: int
    seconds: float
    floor_seconds: float
    mfu: float
    bandwidth_share: float
    gemm_tflops: float
    memory_gigabytes_per_s: float

    def summary(self) -> dict[str, Any]:
        """Return the entry of `compute` in `summary.json`."""
        return msgspec.structs.asdict(self)


class ComputeSums:
    """Accumulates compute by stage and phase over one or several runs, to derive the shares."""

    def __init__(self) -> None:
        # Micro-batches, seconds, seconds at least, FLOPs, bytes, and the FLOPs and bytes that the rates would give.
        self._sums: Floats = np.zeros((0, len(PHASES), 7))

    def add(
        self, floors: Sequence[StageFloor], micro_batches: Sequence[MicroBatchRecord], ledger: Ledger, first: int = 0
    ) -> None:
        """Add a run's micro-batches from place `first` on.

        Args:
            floors: of each stage; empty: nothing is added, as the machines are not known.
            micro_batches: of the run.
            ledger: of the run.
            first: place of the first micro-batch that counts.
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
    """Return the shares of each stage and phase over one run, or over those of all replicas of a fleet.

    It is empty where the machines are not known: of traces, of old run folders, of stages with few weights.
    """
    sums = ComputeSums()
    for record, ledger in runs:
        sums.add(record.floors, record.micro_batches, ledger)
    return sums.shares()
