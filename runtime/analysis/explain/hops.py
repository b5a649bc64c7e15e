"""How long activations took from each stage to the next, as far as a run shows it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..ledger.ledger import Ledger

_ROUNDING = 1e-9  # seconds


@dataclass(frozen=True, slots=True)
class Hop:
    """The hop from `stage` to the next. Its time is visible in micro-batches for which the next stage waited.

    Attributes:
        waited: seconds for which the next stage waited for activations in transit.
        median: median transfer time of such a micro-batch, in seconds.
        tokens: median tokens of such a micro-batch.
        tokens_per_s: transfer rate over all such micro-batches.
        total: transfer seconds of all micro-batches at that rate, including those hidden behind compute.
    """

    stage: int
    waited: float
    median: float
    tokens: float
    tokens_per_s: float
    total: float


def hops_of(ledger: Ledger) -> list[Hop]:
    """Return the hops whose receiving stage has waited, in stage order."""
    hops = []
    for stage, (upstream, lane) in enumerate(zip(ledger.lanes, ledger.lanes[1:], strict=False)):
        place = upstream.places(lane.row) if len(upstream.row) and len(lane.row) else np.full(len(lane.row), -1)
        free = np.append(-np.inf, lane.end[:-1])[place >= 0]
        begin, left = lane.begin[place >= 0], upstream.end[place[place >= 0]]
        tokens = ledger.micro_batches.tokens[ledger.micro_batches.places(lane.micro_batch[place >= 0])]
        late = (free < left) & (begin > left + _ROUNDING)  # the next stage was free: it started on arrival
        seconds = (begin - left)[late]
        if len(seconds):
            rate = max(1.0, float(tokens[late].sum())) / float(seconds.sum())
            waited = float(np.maximum(0.0, begin - np.maximum(left, free)).sum())
            median, held = float(np.median(seconds)), float(np.median(tokens[late]))
            hops.append(Hop(stage, waited, median, held, rate, float(tokens.sum()) / rate))
    return hops
