"""Infers why the first stage waited, since the engine's scheduler has no trace of its own."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from ...core.run_record import Blocked, Wait
from .stage_spans import StageSpan


def depth_of(first: Sequence[StageSpan], left: Sequence[float]) -> int:
    """Return the maximum number of micro-batches in flight.

    Args:
        first: each micro-batch on the first stage.
        left: when it left the last stage, in seconds; in this order.
    """
    return max((1 + _in_flight(left[:i], span.begin) for i, span in enumerate(first)), default=0)


def waits_of_first_stage(
    first: Sequence[StageSpan], left: Sequence[float], held: Sequence[tuple[float, float]]
) -> list[list[Wait]]:
    """Return the waits before each micro-batch. The rest of a gap of the first stage is control.

    - The send of the previous micro-batch waited for its receiver, then was in transit: a wait for a slot, then for the
      send.
    - The maximum number of micro-batches was in flight: the stage waited for a slot.
    - There was a free slot, a micro-batch left during the gap, and the next one is all decodes: they were in flight.
    - After the last micro-batch had left, decodes of the next one were admissible: control, which is not a wait. If it
      has only prompts, whose arrival times are unknown: unknown.

    The second and third rules assume that the engine fills its pipeline whenever it can.

    Args:
        first: each micro-batch on the first stage.
        left: when it left the last stage, in seconds; in this order.
        held: from when its receiver was ready until its send ended, if the send blocked the stage, else (0, 0).
    """
    depth = depth_of(first, left)
    waits: list[list[Wait]] = [[] for _ in first]
    for i in range(1, len(first)):
        start, end, step = first[i - 1].end, first[i].begin, first[i].step
        stood, over = (min(end, time) for time in held[i - 1])
        if stood > start:
            waits[i].append(Wait(start, stood, "depth_full"))
            waits[i].append(Wait(stood, over, "send"))
            start = over
        if end <= start:
            continue
        earlier = left[:i]
        leaves = [time for time in earlier if start < time <= end]
        for until in leaves:
            if _in_flight(earlier, start) >= depth:
                reason: Blocked = "depth_full"
            else:
                reason = "in_flight" if step.prefill_tokens == 0 and step.decode_tokens else "unknown"
            waits[i].append(Wait(start, until, reason))
            start = until
        if not step.decode_tokens and end > start:
            waits[i].append(Wait(start, end, "unknown"))
    return waits


def _in_flight(left: Sequence[float], time: float) -> int:
    """Return how many of these micro-batches, given their ascending exit times, were still in flight at `time`."""
    return len(left) - bisect_right(left, time)
