"""The interface between the coordinator and a pipeline, real or simulated."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from ...conf.structured_outputs import StructuredOutputs
from ..core.messages import MicroBatchMessage, MicroBatchResult
from ..core.run_record import FaultReason, FaultRecord
from ..core.stage_floor import StageMachine


class Clock(Protocol):
    """Wall or virtual time; the only clock that the coordinator reads."""

    def now(self) -> float:
        """Return the time in seconds; it never goes back."""
        ...


class WallClock:
    """`CLOCK_MONOTONIC`, which all processes of a node share."""

    def now(self) -> float:
        """Return the seconds of `CLOCK_MONOTONIC`."""
        return time.monotonic()


class PipelineError(RuntimeError):
    """Fatal pipeline error: a rank died, failed to start, or hangs. Its text is the rank's own error."""


class PipelineFault(PipelineError):  # noqa: N818
    """The pipeline has failed, and `Pipeline.restart` may repair it. Its text describes the fault.

    `since` is the last sign of progress before it, in seconds on the pipeline's clock.
    """

    def __init__(self, text: str, reason: FaultReason, since: float) -> None:
        super().__init__(text)
        self.reason = reason
        self.since = since


class Pipeline(Protocol):
    """A sequence of stages, 0 .. num_stages-1.

    Micro-batches enter in the order of `submit` and leave every stage in that order.
    """

    num_stages: int
    depth: int  # maximum number of micro-batches outstanding
    num_blocks: int  # KV blocks, the minimum over the ranks
    where: list[str]  # node, process and device of each rank

    @property
    def clock(self) -> Clock:
        """The clock for all times in its results."""
        ...

    def submit(self, micro_batch: MicroBatchMessage) -> None:
        """Hand a micro-batch to the pipeline; never blocks.

        At most `depth` may be outstanding, or one more if the pipeline looks ahead.
        """
        ...

    def wait(self, deadline: float) -> list[MicroBatchResult]:
        """Return the results that have arrived, or an empty list once the clock passes `deadline`.

        Raises:
            PipelineFault: the pipeline failed; `restart` or close it.
            PipelineError: it failed permanently.
        """
        ...

    def restart(self, fault: FaultRecord) -> None:
        """Drop every micro-batch, and start to repair the pipeline, with the same stages and weights.

        `wait` continues the repair. When the stages are up again, with an empty KV cache, it fills in `fault.up`, the
        `parts` and the `ranks`, and returns. Nothing may be submitted before then. A fault during the repair needs
        another restart.

        Raises:
            PipelineError: it cannot be repaired.
        """
        ...

    def close(self) -> None:
        """Stop all ranks. May be called twice."""
        ...


class LivePipeline(Pipeline, Protocol):
    """A pipeline on the wall clock, whose `wait` can be interrupted.

    With `looks_ahead` (async scheduling) it keeps the tokens that it samples, so a micro-batch may refer to those of
    the previous one as `UNSEEN_TOKEN`.
    """

    looks_ahead: bool
    machines: list[StageMachine]  # of one rank per stage

    def compile(self, wanted: StructuredOutputs, on_done: Callable[[], None]) -> None:
        """Have the sampling ranks compile structured outputs before the requests that use them.

        `on_done` is called when they have finished or failed, by `wait`, which then returns early, or by `restart`.
        """
        ...

    def wake_on(self, descriptor: int) -> None:
        """Have `wait` return early, with an empty list, while this file descriptor is readable."""
        ...
