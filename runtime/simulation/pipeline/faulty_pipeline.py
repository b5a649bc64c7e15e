"""A simulated pipeline whose ranks fail and are replaced, with the real pipeline's recovery protocol."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from ....conf.schema import ParallelConfig
from ....conf.simulation import FaultsConfig
from ...core.messages import MicroBatchResult, Span
from ...core.run_record import FaultRecord
from ...pipeline.protocol import PipelineFault
from ...pipeline.recovery_limit import RecoveryLimit
from ..cost.stage_costs import StageCosts
from .faults import RankFault
from .simulated_pipeline import SimulatedPipeline


class FaultyPipeline(SimulatedPipeline):
    """A `SimulatedPipeline` with faults.

    A stage stops computing when one of its ranks fails. Micro-batches that have not left the stage by then are lost,
    as are results that have not returned when the fault is detected. An exited process is detected by its closed
    connection. A hung rank is detected by a micro-batch that makes no progress, or during a repair. The repair replaces
    all ranks that have failed by then. If another rank fails during the repair, the repair restarts once that fault is
    detected.

    `wait` also returns an empty list at the time of a fault.

    Args:
        faults: rank faults in time order.
        times: detection delays and durations of the repair phases.
        parallel: the rank grid, its spares and the recovery limit.
        how: the other arguments of `SimulatedPipeline`.
    """

    def __init__(
        self,
        costs: StageCosts,
        *,
        faults: Iterator[RankFault],
        times: FaultsConfig,
        parallel: ParallelConfig,
        **how: Any,
    ) -> None:
        super().__init__(costs, **how)
        self._faults = faults
        self._times = times
        self._tp = parallel.tp
        self._limit = RecoveryLimit(parallel.max_recoveries, parallel.recovery_window_s)
        self._next: RankFault | None = next(faults, None)
        self._failed: list[RankFault] = []  # not detected yet
        self._is_told = False  # whether the spans of lost micro-batches have been returned
        self._spares = [0.0] * parallel.spares  # when each is ready, ascending
        self._fault: FaultRecord | None = None  # under repair
        self._parts: dict[str, float] = {}  # durations of its repair phases, in seconds
        self._replaced: set[int] = set()
        self._up = 0.0

    def wait(self, deadline: float) -> list[MicroBatchResult]:
        """See `Pipeline.wait`. The clock moves to the next result, fault, fault detection or end of a repair."""
        event, clock = self.next_event, self.clock
        if event is None or event > deadline:
            clock.seconds = max(clock.seconds, deadline)
            return []
        if self._fault is None and self._next_result <= event:
            return super().wait(deadline)
        clock.seconds = max(clock.seconds, event)
        if self._next is not None and self._next.at <= event:
            self._failed.append(self._next)
            self._next = next(self._faults, None)
        elif not self._failed:
            self._finish()
        else:
            return self._fail()
        return []

    def restart(self, fault: FaultRecord) -> None:
        """See `Pipeline.restart`. The config sets the duration of each repair phase."""
        now, times = self.clock.seconds, self._times
        self._limit.count(fault.text, now)
        if self._fault is None:
            self._replaced.clear()
        self._replaced.update(failed.rank for failed in self._failed)
        self._failed.clear()
        self._is_told = False
        self._results.clear()
        begun = now + times.stop_s
        self._parts = {
            "stop": times.stop_s,
            "start": max(self._start(begun) for _ in self._replaced),
            "rendezvous": times.rendezvous_s,
            "weights": times.weights_s,
        }
        self._fault, self._up = fault, now + sum(self._parts.values())

    @property
    def next_event(self) -> float | None:
        """Time of the next result, fault, fault detection or end of a repair."""
        at = self._next_result
        if self._fault is not None:
            at = math.inf if self._failed else self._up
        if self._next is not None:
            at = min(at, self._next.at)
        for failed in self._failed:
            at = min(at, self._noticed(failed))
        return at if at < math.inf else None

    @property
    def _next_result(self) -> float:
        """Time of the next result; infinity if none will come."""
        if not self._results:
            return math.inf
        at, result = self._results[0]
        is_stuck = any(self._is_stuck(result.spans, failed) for failed in self._failed)
        return math.inf if is_stuck else at

    def _is_stuck(self, spans: list[Span], failed: RankFault) -> bool:
        """Return whether a micro-batch of these spans had not left the failed rank's stage."""
        stage = failed.rank // self._tp
        left = spans[stage].end if stage == self.num_stages - 1 else spans[stage + 1].input
        return left > failed.at

    def _noticed(self, failed: RankFault) -> float:
        """Return when a fault is detected; infinity while no micro-batch in flight reveals it."""
        times = self._times
        return self._since(failed) + (times.detect_hang_s if failed.hangs else times.detect_process_s)

    def _since(self, failed: RankFault) -> float:
        """Return when a fault starts to block the pipeline; a hung rank blocks once a micro-batch needs it."""
        if not failed.hangs or self._fault is not None:
            return failed.at
        for _, result in self._results:
            if self._is_stuck(result.spans, failed):
                return max(failed.at, result.spans[0].input - self.dispatch_s)
        return math.inf

    def _fail(self) -> list[MicroBatchResult]:
        """Return the spans of lost micro-batches, as real stages report theirs on their own; then raise the fault.

        Raises:
            PipelineFault: the spans have been returned, or there are none.
        """
        lost = [] if self._is_told else self._lost()
        if lost:
            self._is_told = True
            return lost
        failed = min(self._failed, key=self._noticed)
        rank, stage, since = failed.rank, failed.rank // self._tp, self._since(failed)
        if failed.hangs:
            limit = self._times.detect_hang_s
            raise PipelineFault(f"stage {stage} hangs (rank {rank}): no progress within {limit:g} s", "hang", since)
        raise PipelineFault(f"rank {rank} (stage {stage}): its process ended", "process", since)

    def _lost(self) -> list[MicroBatchResult]:
        """Return the spans that stages have computed for lost micro-batches."""
        found = []
        for _, result in self._results:
            spans = self._computed(result.spans)
            if spans:
                found.append(MicroBatchResult(result.epoch, result.micro_batch, spans))
        return found

    def _computed(self, spans: list[Span]) -> list[Span]:
        """Return the spans of a micro-batch that have ended by now, before their stages failed."""
        found: list[Span] = []
        for span in spans:
            failed = [failed for failed in self._failed if failed.rank // self._tp == span.stage]
            if span.end > min([self.clock.seconds, *(each.at for each in failed)]):
                break
            found.append(span)
            if any(self._is_stuck(spans, each) for each in failed):
                break
        return found

    def _start(self, now: float) -> float:
        """Return the seconds from `now` until a replacement rank has started.

        The first spare is used if there is one, and a new spare starts.
        """
        times = self._times
        if not self._spares:
            return times.start_s
        stands_by = self._spares.pop(0)
        self._spares.append(now + times.start_s)
        return max(0.0, stands_by - now) + times.start_with_spare_s

    def _finish(self) -> None:
        """End the repair: all stages are up again."""
        fault = self._fault
        assert fault is not None
        fault.parts, fault.ranks, fault.up = self._parts, sorted(self._replaced), self._up
        self._free_at = [self._up] * self.num_stages
        self._link_free_at = [self._up] * self.num_stages
        self._fault = None
