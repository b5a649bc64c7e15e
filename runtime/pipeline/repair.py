"""The state of a pipeline repair, from the fault until all stages are up again."""

from __future__ import annotations

from ..core.run_record import FaultRecord
from .handshake import Ready


class Repair:
    """Which ranks are restarted, and the progress of each rank.

    Surviving ranks disconnect from each other and wait. Ranks in `replaced` are restarted and join. When all have
    joined, they reconnect, and the new ranks load their shards.

    Args:
        fault: the fault, whose record `finish` completes.
        replaced: ranks that are restarted.
        stopped: when the old ranks had been stopped, in seconds on the coordinator's clock.
    """

    def __init__(self, fault: FaultRecord, replaced: set[int], stopped: float) -> None:
        self.fault = fault
        self.stopped = stopped
        self.looked = stopped  # when places for all ranks were last checked
        self.unplaced_since: float | None = None
        self.replaced = replaced
        self.present: set[int] = set()  # surviving ranks that have begun to rejoin
        self.ready: dict[int, Ready] = {}
        self.joined: float | None = None  # when all ranks were connected to the coordinator

    def take(self, message: Ready) -> None:
        """Record that a rank is ready; messages of an earlier repair are ignored."""
        if message.epoch == self.fault.epoch:
            self.ready[message.rank] = message

    def finish(self, now: float, num_stages: int | None) -> None:
        """Complete the fault's record: all ranks are ready. `num_stages` is None if no stage was lost."""
        assert self.joined is not None
        rendezvous_s = min(max(ready.rendezvous_s for ready in self.ready.values()), now - self.joined)
        self.fault.parts = {
            "stop": self.stopped - self.fault.detected,
            "start": self.joined - self.stopped,
            "rendezvous": rendezvous_s,
            "weights": now - self.joined - rendezvous_s,
        }
        self.fault.ranks = sorted(self.replaced)
        self.fault.stages = num_stages
        self.fault.up = now
