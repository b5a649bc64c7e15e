"""A snapshot of a scheduler's queue sizes."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class QueueSnapshot:
    """The queue sizes that a chunk picker needs."""

    depth: int  # micro-batches in flight
    backlog: int  # prompt tokens not yet dispatched
    num_waiting: int  # requests not admitted
    num_running: int  # requests admitted and not finished
    num_prefilling: int  # running requests whose prompt is not fully dispatched
    num_admissible: float  # further requests that slots and KV blocks have room for

    @property
    def decodes_a_micro_batch(self) -> float:
        """Decodes per micro-batch if all admissible requests run."""
        return (self.num_running + self.num_admissible - self.num_prefilling) / self.depth
