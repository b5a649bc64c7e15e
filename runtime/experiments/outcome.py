"""What Figure 12 reads from a run: when requests finished, their bubble time, and how stages spent their time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..core.micro_batch_columns import Floats, Ints
from ..core.run_record import RunRecord
from ..ledger.causes import CAUSES, Cause
from ..ledger.ledger import Ledger


@dataclass(frozen=True, slots=True)
class MicroBatchMeans:
    """The number of micro-batches of one kind, their mean tokens, and their mean seconds on a stage."""

    count: int
    tokens: float
    seconds: float


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """The outcome of a run, without its record. Times are seconds.

    Attributes:
        seconds: The makespan.
        busiest: Compute time of the stage that computes longest.
        inputs: Prompt tokens of each request.
        outputs: Output tokens of each request.
        bubbles: Bubble time of each request.
        finished: When each request finished, from the first arrival, ascending.
        idle: Idle time by cause, summed over the stages.
        stage_seconds: All time of all stages.
        with_chunk: Means of the micro-batches with a chunk, on the stage in the middle of the pipeline.
        decodes_only: Means of the micro-batches without a chunk, on the same stage.
    """

    seconds: float
    busiest: float
    inputs: Ints
    outputs: Ints
    bubbles: Floats
    finished: Floats
    idle: Mapping[Cause, float]
    stage_seconds: float
    with_chunk: MicroBatchMeans
    decodes_only: MicroBatchMeans

    def idle_share(self, causes: Sequence[Cause]) -> float:
        """Return the share of stage time that is idle for one of `causes`."""
        return sum(self.idle[cause] for cause in causes) / self.stage_seconds

    def value(self, quantity: str) -> float:
        """Return the median bubble time if the quantity's name starts with "median", else the makespan."""
        return float(np.median(self.bubbles)) if quantity.startswith("median") else self.seconds


def outcome_of(records: Sequence[RunRecord]) -> RunOutcome:
    """Compute the outcome of a run from the records of its replicas.

    Raises:
        AssertionError: The ledger does not conserve time.
    """
    idle = dict.fromkeys(CAUSES, 0.0)
    bubbles, finished, requests = [], [], []
    ends, busy, stage_seconds = list[float](), list[float](), 0.0
    with_chunk, decodes_only = list[tuple[int, float]](), list[tuple[int, float]]()
    for record in records:
        ledger = Ledger(record)
        ledger.check()
        for cause, seconds in ledger.seconds_by_cause().items():
            idle[cause] += seconds
        requests += record.requests
        bubbles += [ledger.bubble_of_request(request.request) for request in record.requests]
        finished += [request.finished - ledger.t0 for request in record.requests if request.finished is not None]
        ends.append(ledger.span_seconds)
        busy += [ledger.busy_seconds(stage) for stage in range(ledger.num_stages)]
        stage_seconds += ledger.stage_seconds
        lane = ledger.lanes[ledger.num_stages // 2]
        times = dict(zip(lane.micro_batch.tolist(), lane.seconds.tolist(), strict=True))
        for micro_batch in record.micro_batches:
            kind = with_chunk if micro_batch.chunks else decodes_only
            kind.append((micro_batch.num_tokens, times[micro_batch.micro_batch]))
    return RunOutcome(
        seconds=max(ends),
        busiest=max(busy),
        inputs=np.array([request.prompt_tokens for request in requests], np.int64),
        outputs=np.array([request.output_tokens for request in requests], np.int64),
        bubbles=np.array(bubbles, np.float64),
        finished=np.sort(np.array(finished, np.float64)),
        idle=idle,
        stage_seconds=stage_seconds,
        with_chunk=_means(with_chunk),
        decodes_only=_means(decodes_only),
    )


def _means(tokens_and_seconds: Sequence[tuple[int, float]]) -> MicroBatchMeans:
    if not tokens_and_seconds:
        return MicroBatchMeans(0, 0.0, 0.0)
    tokens, seconds = np.mean(np.array(tokens_and_seconds), axis=0).tolist()
    return MicroBatchMeans(len(tokens_and_seconds), tokens, seconds)
