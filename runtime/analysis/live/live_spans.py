"""The stages' spans and idle intervals since the last ledger update, for the live page."""

from __future__ import annotations

import numpy as np

from ...core.micro_batch_columns import Floats, Ints
from ...serving.messages import LiveSpans
from ..ledger.lanes import Lane
from ..ledger.ledger import Ledger
from ..ledger.running_ledger import first_place

MAX_BOXES = 4096  # micro-batches times stages per message
_UNITS_PER_S = 1e5


def live_spans(ledger: Ledger, first: int) -> LiveSpans:
    """Return the newest spans and idle intervals of each stage, of at most `MAX_BOXES` boxes.

    Args:
        ledger: ledger of a record whose spans have all arrived. Micro-batches that a stage did not compute due to a
            fault have zero length on it.
        first: index of the first new micro-batch.
    """
    micro_batches = ledger.micro_batches
    shown = max(first, len(micro_batches.micro_batch) - max(1, MAX_BOXES // ledger.num_stages))
    starts = [first_place(ledger, lane, shown) for lane in ledger.lanes]
    idle = [(columns, columns.place >= start) for columns, start in zip(ledger.idle_columns, starts, strict=True)]
    lanes = [lane if len(lane.begin) else ledger.lanes[0] for lane in ledger.lanes]  # a lost stage has no spans
    begins, ends = zip(*(_times(lane, micro_batches.micro_batch[shown:]) for lane in lanes), strict=True)
    ends = tuple(end if len(lane.end) else begin for lane, begin, end in zip(ledger.lanes, begins, ends, strict=True))
    origin = float(begins[0][0])

    def units(seconds: Floats) -> list[int]:
        units: list[int] = np.round((seconds - origin) * _UNITS_PER_S).astype(np.int64).tolist()
        return units

    return LiveSpans(
        origin=origin,
        first=int(micro_batches.micro_batch[shown]),
        left_out=shown - first,
        prefill=micro_batches.prefill[shown:].tolist(),
        decodes=micro_batches.decodes[shown:].tolist(),
        begin=[units(begin) for begin in begins],
        end=[units(end) for end in ends],
        idle_start=[units(columns.start[is_new]) for columns, is_new in idle],
        idle_end=[units(columns.end[is_new]) for columns, is_new in idle],
        cause=[columns.cause[is_new].tolist() for columns, is_new in idle],
    )


def _times(lane: Lane, micro_batches: Ints) -> tuple[Floats, Floats]:
    """Begin and end of each micro-batch in a lane; one that the stage did not compute has the next one's begin."""
    place = np.minimum(np.searchsorted(lane.micro_batch, micro_batches), len(lane.micro_batch) - 1)
    begin = lane.begin[place]
    return begin, np.where(lane.micro_batch[place] == micro_batches, lane.end[place], begin)
