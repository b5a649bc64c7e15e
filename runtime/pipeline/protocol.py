"""The seam between the coordinator and a pipeline, real or simulated."""

from __future__ import annotations

import time
from typing import Protocol

from ..core.messages import MicroBatchMessage, MicroBatchResult


class Clock(Protocol):
    """Wall or virtual time, and the only clock that the coordinator reads."""

    def now(self) -> float:
        """Seconds, monotonic."""
        ...


class WallClock:
    """`CLOCK_MONOTONIC`, which all processes of a node share."""

    def now(self) -> float:
        return time.monotonic()


class PipelineError(RuntimeError):
    """The pipeline cannot go on: a rank died, failed to start, or hangs. Its text is the rank's own error."""


class Pipeline(Protocol):
    """Stages 0 .. num_stages-1 in a row. Micro-batches enter in the order of `submit` and leave every stage in that
    order."""

    num_stages: int
    depth: int  # maximum number of micro-batches outstanding
    num_blocks: int  # KV blocks, the minimum over the ranks
    where: list[str]  # node, process and device of each rank

    @property
    def clock(self) -> Clock: ...

    def submit(self, micro_batch: MicroBatchMessage) -> None:
        """Hand a micro-batch to the pipeline; never blocks. At most `depth` may be outstanding."""
        ...

    def wait(self, deadline: float) -> list[MicroBatchResult]:
        """Results that have come, or an empty list once the clock passes `deadline`.

        Raises:
            PipelineError: the pipeline failed.
        """
        ...

    def close(self) -> None:
        """End all ranks. May be called twice."""
        ...


class LivePipeline(Pipeline, Protocol):
    """A pipeline on the wall clock, whose `wait` something else may end."""

    def wake_on(self, descriptor: int) -> None:
        """Have `wait` return early, with an empty list, while this file descriptor is readable."""
        ...
