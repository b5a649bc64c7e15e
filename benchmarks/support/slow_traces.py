"""Traces of another engine's ranks with one slow stage: a pipeline whose every time is known, played."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from gapless.runtime.traces.rank_trace import RankTrace, Step, Transfer, merged

_TRANSFER = 0.0002  # seconds
_LATE = 0.0002  # seconds from when a micro-batch may be dispatched until it is


@dataclass(frozen=True, slots=True)
class SlowStage:
    """A pipeline of another engine.

    Attributes:
        stages: of the pipeline.
        slow: the stage that takes `factor` times as long as the others.
        factor: 1 of a control.
        holds_sender: a send holds the sender until the receiver has taken it; else a stage computes on meanwhile.
        count: micro-batches.
    """

    stages: int
    slow: int
    factor: float
    holds_sender: bool = False
    count: int = 300

    @property
    def control(self) -> SlowStage:
        """The same pipeline with stages that are alike."""
        return replace(self, factor=1.0)

    def play(self) -> tuple[list[RankTrace], float]:
        """Return the traces of its ranks, and the seconds that it takes."""
        chosen = random.Random(self.count)
        traces = [RankTrace(f"rank{rank}", rank, rank, engine="vLLM") for rank in range(self.stages)]
        computes: list[list[tuple[float, float]]] = [[] for _ in traces]
        free = [0.0] * self.stages  # from when on each stage can turn to a micro-batch
        done: list[float] = []  # when each micro-batch has left the pipeline
        for number in range(self.count):
            prompt, decodes = chosen.choice([0, 0, 64, 128, 128, 256]), chosen.randint(8, 32)
            seconds = (0.004 + 0.00004 * prompt + 0.00005 * decodes) * chosen.uniform(0.98, 1.02)
            may = done[number - self.stages] if number >= self.stages else 0.0
            begin = max(free[0], may) + _LATE
            for stage, trace in enumerate(traces):
                end = begin + seconds * (self.factor if stage == self.slow else 1.0)
                counts = (int(prompt > 0), prompt, 0, decodes, decodes, 500 * decodes)
                trace.steps.append(Step(begin, end, f"execute {number}", *counts))
                computes[stage].append((begin, end))
                free[stage] = end
                if stage + 1 < self.stages:
                    stood = free[stage + 1]
                    over = max(end, stood) + _TRANSFER if self.holds_sender else max(end + _TRANSFER, stood)
                    held = over if self.holds_sender else end + _TRANSFER
                    trace.sends.append(Transfer(end, held, stage + 1, 4096))
                    traces[stage + 1].receives.append(Transfer(free[stage + 1], over, stage, 4096))
                    free[stage] = over if self.holds_sender else end
                    begin = over
            done.append(free[-1])
        for trace, own in zip(traces, computes, strict=True):
            trace.computes = merged([start for start, _ in own], [end for _, end in own])
        return traces, done[-1]


SLOW_STAGES = {
    "pair, 1.15": SlowStage(2, 1, 1.15),
    "pair, 1.4, holds": SlowStage(2, 0, 1.4, holds_sender=True),
    "pair, 2.5": SlowStage(2, 1, 2.5),
    "four, 1.15": SlowStage(4, 2, 1.15),
    "four, 1.4": SlowStage(4, 0, 1.4),
    "four, 1.4, holds": SlowStage(4, 3, 1.4, holds_sender=True),
    "four, 2.5": SlowStage(4, 1, 2.5),
}
