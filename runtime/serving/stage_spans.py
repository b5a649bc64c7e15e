"""What the stages did since the last count of the ledger, as the live page draws it."""

from __future__ import annotations

import numpy as np

from ..core.micro_batch_columns import Floats
from ..ledger.ledger import Ledger
from .messages import StageSpans

MAX_BOXES = 4096  # micro-batches times stages of a message
_UNITS_PER_S = 1e5


def stage_spans(ledger: Ledger, first: int) -> StageSpans:
    """The newest spans and idle intervals of each stage, of at most `MAX_BOXES` boxes.

    Args:
        ledger: of a record whose micro-batches were all computed by all stages.
        first: the place of the first micro-batch that is new.
    """
    micro_batches = ledger.micro_batches
    shown = max(first, len(micro_batches.micro_batch) - max(1, MAX_BOXES // ledger.num_stages))
    origin = float(ledger.lanes[0].begin[shown])
    idle = [(columns, columns.place >= shown) for columns in ledger.idle_columns]

    def units(seconds: Floats) -> list[int]:
        units: list[int] = np.round((seconds - origin) * _UNITS_PER_S).astype(np.int64).tolist()
        return units

    return StageSpans(
        origin=origin,
        first=int(micro_batches.micro_batch[shown]),
        left_out=shown - first,
        prefill=micro_batches.prefill[shown:].tolist(),
        decodes=micro_batches.decodes[shown:].tolist(),
        begin=[units(lane.begin[shown:]) for lane in ledger.lanes],
        end=[units(lane.end[shown:]) for lane in ledger.lanes],
        idle_start=[units(columns.start[is_new]) for columns, is_new in idle],
        idle_end=[units(columns.end[is_new]) for columns, is_new in idle],
        cause=[columns.cause[is_new].tolist() for columns, is_new in idle],
    )
