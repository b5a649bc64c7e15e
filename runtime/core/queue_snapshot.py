"""The numbers of a scheduler's queues at one moment."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class QueueSnapshot:
    """What a chunk picker needs to know of the queues."""

    depth: int  # micro-batches in flight
    backlog: int  # prompt tokens not yet dispatched
    num_waiting: int  # requests not admitted
    num_running: int  # requests admitted and not finished
    num_prefilling: int  # of the running, those whose prompt is not wholly dispatched
    num_admissible: float  # requests that slots and KV blocks have room for, beside the running

    @property
    def decodes_a_micro_batch(self) -> float:
        """Decodes of a micro-batch while as many requests run as can."""
        return (self.num_running + self.num_admissible - self.num_prefilling) / self.depth
