"""The error of the scheduler's stage-time predictions."""

from __future__ import annotations

import numpy as np

from ...core.micro_batch_columns import Floats
from ...core.run_record import RunRecord
from .ledger import Ledger


def predicted_and_measured(record: RunRecord, ledger: Ledger, first: int = 0) -> list[tuple[Floats, Floats]]:
    """Return for each stage the predicted and the measured seconds of the micro-batches that have a prediction.

    `first`: index of the first micro-batch of the record that counts.
    """
    predictions = {m.micro_batch: m.predicted for m in record.micro_batches[first:] if m.predicted}
    pairs = []
    for stage, lane in enumerate(ledger.lanes):
        places = [i for i, micro_batch in enumerate(lane.micro_batch.tolist()) if micro_batch in predictions]
        predicted = np.array([predictions[int(lane.micro_batch[i])][stage] for i in places], np.float64)
        pairs.append((predicted, lane.seconds[places]))
    return pairs


def prediction_error(pairs: list[tuple[Floats, Floats]]) -> dict[str, float] | None:
    """Return the median and p90 of |predicted / measured - 1| over all stages; None without predictions.

    Args:
        pairs: predicted and measured seconds of each stage.
    """
    errors = relative_errors(pairs)
    if not len(errors):
        return None
    median, p90 = np.percentile(errors, [50, 90]).tolist()
    return {"median": median, "p90": p90}


def relative_errors(pairs: list[tuple[Floats, Floats]]) -> Floats:
    """Return |predicted / measured - 1| of all stages."""
    return np.concatenate([np.empty(0), *(np.abs(p[m > 0] / m[m > 0] - 1.0) for p, m in pairs)])
