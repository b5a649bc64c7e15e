"""How long activations took from one stage to the next, estimated from a run's spans."""

from __future__ import annotations

import numpy as np

from ..ledger.ledger import Ledger

_ROUNDING = 1e-9  # seconds


def slowest_hop(ledger: Ledger) -> tuple[int | None, dict[str, float]]:
    """Return the stage after which the next one waited most for activations in transit, and the evidence by name.

    Of micro-batches for which the next stage waited, which show their transfer: `link_s` is the median transfer time,
    `tokens` their median size, `tokens_per_s` the transfer rate. None and no evidence if there are none.
    """
    found: tuple[int | None, dict[str, float]] = None, {}
    most = -np.inf
    for stage, (upstream, lane) in enumerate(zip(ledger.lanes, ledger.lanes[1:], strict=False)):
        place = upstream.places(lane.row) if len(upstream.row) and len(lane.row) else np.full(len(lane.row), -1)
        free = np.append(-np.inf, lane.end[:-1])[place >= 0]
        begin, left = lane.begin[place >= 0], upstream.end[place[place >= 0]]
        tokens = ledger.micro_batches.tokens[ledger.micro_batches.places(lane.micro_batch[place >= 0])]
        late = (free < left) & (begin > left + _ROUNDING)  # the next stage was free: it started on arrival
        seconds = (begin - left)[late]
        waited = float(np.maximum(0.0, begin - np.maximum(left, free)).sum())
        if len(seconds) and waited > most:
            rate = max(1.0, float(tokens[late].sum())) / float(seconds.sum())
            numbers = {"link_s": float(np.median(seconds)), "tokens": float(np.median(tokens[late]))}
            most, found = waited, (stage, numbers | {"tokens_per_s": rate})
    return found
