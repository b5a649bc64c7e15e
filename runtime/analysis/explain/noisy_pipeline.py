"""The simulated pipeline with the noise of a real run."""

from __future__ import annotations

from collections import deque
from typing import Any

from ...core.messages import MicroBatchMessage, MicroBatchResult
from ...simulation.cost.operators import HostTimes
from ...simulation.cost.stage_costs import MicroBatchShape, StageCosts
from ...simulation.pipeline.simulated_pipeline import SimulatedPipeline
from .noise import DrawnNoise


class NoisyPipeline(SimulatedPipeline):
    """A `SimulatedPipeline` whose stages, links and host are slowed down by `noise`.

    A coordinator that gets a result late also takes the results that have arrived in the meantime.

    Args:
        costs: seconds of each stage without noise.
        control: host times without noise.
        least_result: least seconds from the end of the last stage until a waiting coordinator has the result.
        how: the other arguments of `SimulatedPipeline`.
    """

    def __init__(
        self, costs: StageCosts, control: HostTimes, noise: DrawnNoise, *, least_result: float, **how: Any
    ) -> None:
        self._next = _NextTimes(costs)
        super().__init__(self._next, **how)
        self._quiet = costs
        self._control = control
        self._noise = noise
        self._longer_sends: list[float] = []
        self._least_result = least_result
        self._come: deque[float] = deque()  # arrival times of the outstanding results

    def submit(self, micro_batch: MicroBatchMessage) -> None:
        """See `Pipeline.submit`. Each micro-batch draws its own factors for stages, links and the host."""
        control, times = self._control, self._quiet.seconds(MicroBatchShape.of(micro_batch))
        longer = self._noise.at(self.clock.seconds, sum(times))
        self._next.times = [seconds * factor for seconds, factor in zip(times, longer.stages, strict=True)]
        self._longer_sends = longer.sends
        self.dispatch_s = control.dispatch * longer.dispatch
        self.result_s = control.result * longer.result
        self._free_at = [
            end + control.turnaround * factor for end, factor in zip(self._free_at, longer.turnaround, strict=True)
        ]
        super().submit(micro_batch)
        at, _ = self._results[-1]
        self._come.append(at - self.result_s + min(self.result_s, self._least_result))

    def wait(self, deadline: float) -> list[MicroBatchResult]:
        """See `Pipeline.wait`. Results that arrived while the coordinator was late are returned together."""
        results = super().wait(deadline)
        if results:
            self._come.popleft()
            while self._come and self._come[0] <= self.clock.seconds:
                self._come.popleft()
                results.append(self._results.popleft()[1])
        return results

    def _send(self, rows: int) -> list[float]:
        sends = super()._send(rows)
        self._sends.clear()  # no caching: each send takes its own time
        return [*(seconds * factor for seconds, factor in zip(sends, self._longer_sends, strict=False)), 0.0]


class _NextTimes(StageCosts):
    """Stage costs that return the preset times of the next micro-batch."""

    def __init__(self, costs: StageCosts) -> None:
        super().__init__(costs.layers, costs.operators)
        self.times: list[float] = []

    def seconds(self, shape: MicroBatchShape) -> list[float]:
        return self.times
