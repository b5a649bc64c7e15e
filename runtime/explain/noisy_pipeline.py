"""The simulated pipeline with the noise of a real run."""

from __future__ import annotations

from typing import Any

from ..core.messages import MicroBatchMessage
from ..cost.operators import HostTimes
from ..cost.stage_costs import MicroBatchShape, StageCosts
from ..simulation.pipeline import SimulatedPipeline
from .noise import DrawnNoise


class NoisyPipeline(SimulatedPipeline):
    """A `SimulatedPipeline` whose stages, links and host take as much longer as `noise` says.

    Args:
        costs: seconds of each stage without noise.
        control: the host's seconds without noise.
        how: the other arguments of `SimulatedPipeline`.
    """

    def __init__(self, costs: StageCosts, control: HostTimes, noise: DrawnNoise, **how: Any) -> None:
        self._noisy = _NoisyCosts(costs, noise)
        super().__init__(self._noisy, **how)
        self._control = control
        self._noise = noise

    def submit(self, micro_batch: MicroBatchMessage) -> None:
        control, noise = self._control, self._noise
        self._noisy.now = self.clock.seconds
        self.dispatch_s = control.dispatch * noise.dispatch()
        self.result_s = control.result * noise.result()
        self.turnaround_s = control.turnaround * noise.turnaround()
        super().submit(micro_batch)

    def _send(self, rows: int) -> list[float]:
        sends = super()._send(rows)
        self._sends.clear()  # each send draws its own
        return [seconds * self._noise.link() for seconds in sends]


class _NoisyCosts(StageCosts):
    """Stage costs at a time, `now`, that noise depends on."""

    def __init__(self, costs: StageCosts, noise: DrawnNoise) -> None:
        super().__init__(costs.layers, costs.operators)
        self.now = 0.0
        self._quiet = costs
        self._noise = noise

    def seconds(self, shape: MicroBatchShape) -> list[float]:
        times = self._quiet.seconds(shape)
        factors = self._noise.stages(self.now, sum(times))
        return [seconds * factor for seconds, factor in zip(times, factors, strict=True)]
