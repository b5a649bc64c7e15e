"""What a difference reads of one of its two runs, without the run's record."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ....core.latencies import GOES_ON, NOT_COMPLETED
from ....core.micro_batch_columns import Floats, Ints
from ...ledger.causes import CAUSES
from ...ledger.fleet import Fleet
from ...ledger.ledger import Ledger

COMPUTE = "compute"
LEDGER_PARTS = (COMPUTE, *(str(cause) for cause in CAUSES))  # parts of a stage's time in the ledger


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """The tokens of a completed request, its end-to-end latency and its bubble time in seconds."""

    prompt: int
    output: int
    latency: float
    bubble: float


class RunSide:
    """One pipeline or several replicas, whose stages are numbered consecutively.

    Attributes:
        seconds: the makespan.
        stage_names: each stage's name.
        busy, idle: seconds of each stage, [stages] and [stages, causes].
        micro_batches, tokens: number of micro-batches, and of the tokens in them.
        requests: the completed requests by number.
    """

    def __init__(self, fleet: Fleet) -> None:
        fleet.check()
        numbers = range(fleet.num_stages)
        self.seconds = fleet.span_seconds
        self.stage_names = [fleet.stage_name(stage) for stage in numbers]
        self.busy: Floats = np.array([fleet.busy_seconds(stage) for stage in numbers])
        self.idle: Floats = np.array([list(fleet.seconds_by_cause(stage).values()) for stage in numbers])
        self.micro_batches = sum(len(ledger.micro_batches.micro_batch) for ledger in fleet.ledgers)
        self.tokens = sum(int(ledger.micro_batches.tokens.sum()) for ledger in fleet.ledgers)
        self.requests = {
            request.request: ServedRequest(
                request.prompt_tokens, request.output_tokens, request.token_times[-1] - request.arrival, bubble
            )
            for request, bubble in fleet.served
            if request.token_times and request.finish_reason not in (*NOT_COMPLETED, GOES_ON)
        }
        self._replicas = [_Computed(ledger) for ledger in fleet.ledgers]
        self._places = [(n, own) for n, ledger in enumerate(fleet.ledgers) for own in range(ledger.num_stages)]

    @property
    def mean(self) -> dict[str, float]:
        """Seconds by `LEDGER_PARTS`, averaged over the stages."""
        values = [float(self.busy.mean()), *self.idle.mean(axis=0).tolist()]
        return dict(zip(LEDGER_PARTS, values, strict=True))

    def computed(self, stage: int | None = None) -> tuple[Floats, Floats]:
        """Return the features of micro-batches [N, features], and their seconds on a stage, or on all stages [N]."""
        if stage is not None:
            replica, own = self._places[stage]
            computed = self._replicas[replica]
            return computed.features[computed.places[own]], computed.seconds[own]
        rows = [computed.features for computed in self._replicas]
        return np.concatenate(rows), np.concatenate([computed.on_all_stages() for computed in self._replicas])


class _Computed:
    """The micro-batches of a replica: the features of each, and on each stage their rows and compute seconds.

    The last row is of micro-batches without a record.
    """

    def __init__(self, ledger: Ledger) -> None:
        features = ledger.micro_batches.features
        self.features: Floats = np.append(features, np.zeros((1, features.shape[1])), axis=0)
        self.places: list[Ints] = [ledger.micro_batches.places(lane.micro_batch) for lane in ledger.lanes]
        self.seconds: list[Floats] = [lane.seconds for lane in ledger.lanes]

    def on_all_stages(self) -> Floats:
        """Return the compute seconds of each row, summed over the stages."""
        summed = np.zeros(len(self.features))
        for places, seconds in zip(self.places, self.seconds, strict=True):
            np.add.at(summed, places, seconds)
        return summed
