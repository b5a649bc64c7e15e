"""Why the first stage waited, as far as a trace shows it: the engine's scheduler has no trace of its own."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from ..core.run_record import Blocked, Wait
from .stage_spans import StageSpan


def depth_of(first: Sequence[StageSpan], left: Sequence[float]) -> int:
    """Return the most micro-batches that were in flight at once.

    Args:
        first: each micro-batch on the first stage.
        left: when it left the last stage, in seconds; in this order.
    """
    return max((1 + _in_flight(left[:i], span.begin) for i, span in enumerate(first)), default=0)


def waits_of_first_stage(
    first: Sequence[StageSpan], left: Sequence[float], held: Sequence[tuple[float, float]]
) -> list[list[Wait]]:
    """Return the waits before each micro-batch. What is no wait in a gap of the first stage is control.

    - The stage's send of the micro-batch before waited for its receiver, then was under way: a wait for a slot, then
      for the send.
    - As many micro-batches were in flight as ever: the stage waited for a slot.
    - There was room, a micro-batch left then, and the next one is all decodes: they were in flight.
    - After the last micro-batch had left, decodes of the next one were admissible: control, which is no wait. Of
      prompts nobody knows when they came: unknown.

    The second and the third hold for engines that fill their pipeline whenever they can.

    Args:
        first: each micro-batch on the first stage.
        left: when it left the last stage, in seconds; in this order.
        held: from when its receiver stood until its send was over, where the send held up the stage, else (0, 0).
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
    """Return how many of these micro-batches, in the order in which they left, had not left by then."""
    return len(left) - bisect_right(left, time)
