"""What Figure 12 keeps of a run: when requests ended, what each lost to bubbles, where stage time went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..core.micro_batch_columns import Floats, Ints
from ..core.run_record import RunRecord
from ..ledger.causes import CAUSES, Cause
from ..ledger.ledger import Ledger


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is kept of a run.

    `seconds`: the makespan; `busiest`: compute of the stage that computed longest.
    `inputs`, `outputs`: tokens, a value a request. `bubbles`, `finished`: seconds, the same; the latter from the first
    arrival, rising. `idle`: seconds by cause over all stages, of `stage_seconds`. `kinds`: of micro-batches with a
    chunk and of those without, how many, their mean tokens, their mean seconds on a stage in the middle.
    """

    seconds: float
    busiest: float
    inputs: Ints
    outputs: Ints
    bubbles: Floats
    finished: Floats
    idle: Mapping[Cause, float]
    stage_seconds: float
    kinds: tuple[tuple[int, float, float], tuple[int, float, float]]

    def idle_share(self, causes: Sequence[Cause]) -> float:
        return sum(self.idle[cause] for cause in causes) / self.stage_seconds

    def value(self, quantity: str) -> float:
        return float(np.median(self.bubbles)) if quantity.startswith("median") else self.seconds


def outcome_of(records: Sequence[RunRecord]) -> Outcome:
    """Of the replicas of one run.

    Raises:
        AssertionError: time is not conserved.
    """
    idle = dict.fromkeys(CAUSES, 0.0)
    bubbles, finished, requests = [], [], []
    ends, busy, stage_seconds = list[float](), list[float](), 0.0
    made: tuple[list[tuple[int, float]], list[tuple[int, float]]] = ([], [])
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
            made[0 if micro_batch.chunks else 1].append((micro_batch.num_tokens, times[micro_batch.micro_batch]))
    return Outcome(
        seconds=max(ends),
        busiest=max(busy),
        inputs=np.array([request.prompt_tokens for request in requests], np.int64),
        outputs=np.array([request.output_tokens for request in requests], np.int64),
        bubbles=np.array(bubbles, np.float64),
        finished=np.sort(np.array(finished, np.float64)),
        idle=idle,
        stage_seconds=stage_seconds,
        kinds=(_kind(made[0]), _kind(made[1])),
    )


def _kind(made: Sequence[tuple[int, float]]) -> tuple[int, float, float]:
    if not made:
        return 0, 0.0, 0.0
    tokens, seconds = np.mean(np.array(made), axis=0).tolist()
    return len(made), tokens, seconds
