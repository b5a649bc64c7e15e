"""Measurements of a run for Figure 12: completion times, bubble times, and use of stage time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gapless.runtime.analysis.drawing.chart_data import fleet_chart_data
from gapless.runtime.analysis.ledger.causes import Cause
from gapless.runtime.analysis.ledger.fleet import Fleet
from gapless.runtime.core.micro_batch_columns import Floats, Ints, values_at
from gapless.runtime.core.run_record import RunRecord


@dataclass(frozen=True, slots=True)
class MicroBatchMeans:
    """The number of micro-batches of one kind, their mean tokens, and their mean seconds on a stage."""

    count: int
    tokens: float
    seconds: float

    @classmethod
    def of(cls, tokens: Ints, seconds: Floats) -> MicroBatchMeans:
        """Return the means of these micro-batches; 0 where there are none."""
        return cls(len(tokens), float(tokens.mean()), float(seconds.mean())) if len(tokens) else cls(0, 0.0, 0.0)


class RunOutcome:
    """The outcome of a run, without its record. Times are seconds.

    Attributes:
        seconds: The makespan.
        busiest: Compute time of the stage that computes longest.
        inputs: Prompt tokens of each request.
        outputs: Output tokens of each request.
        bubbles: Bubble time of each request.
        finished: When each request finished, from the first arrival, ascending.
        with_chunk: Means of the micro-batches with a chunk, on the stage in the middle of the pipeline.
        decodes_only: Means of the micro-batches without a chunk, on the same stage.

    Args:
        records: Of the run's replicas.
    """

    def __init__(self, records: Sequence[RunRecord]) -> None:
        fleet = Fleet(records)
        fleet.check()
        data = fleet_chart_data(fleet)
        self.seconds = fleet.span_seconds
        self.busiest = max(fleet.busy_seconds(stage) for stage in range(fleet.num_stages))
        self.inputs: Ints = np.array([request.prompt_tokens for request, _ in fleet.served], np.int64)
        self.outputs: Ints = np.array([request.output_tokens for request, _ in fleet.served], np.int64)
        self.bubbles, self.finished = data.bubbles, data.finished
        self._idle, self._stage_seconds = fleet.seconds_by_cause(), fleet.stage_seconds
        middle = [(ledger.micro_batches, ledger.lanes[ledger.num_stages // 2]) for ledger in fleet.ledgers]
        places = [columns.places(lane.micro_batch) for columns, lane in middle]
        tokens, prefill = (
            np.concatenate(
                [values_at(getattr(columns, name), at) for (columns, _), at in zip(middle, places, strict=True)]
            )
            for name in ("tokens", "prefill")
        )
        seconds = np.concatenate([lane.seconds for _, lane in middle])
        self.with_chunk = MicroBatchMeans.of(tokens[prefill > 0], seconds[prefill > 0])
        self.decodes_only = MicroBatchMeans.of(tokens[prefill == 0], seconds[prefill == 0])

    def idle_share(self, causes: Sequence[Cause]) -> float:
        """Return the share of stage time that is idle for one of `causes`."""
        return sum(self._idle[cause] for cause in causes) / self._stage_seconds

    def value(self, quantity: str) -> float:
        """Return the median bubble time if the quantity's name starts with "median", else the makespan."""
        return float(np.median(self.bubbles)) if quantity.startswith("median") else self.seconds
