"""The state of a repair of the pipeline, from the fault until stages stand again."""

from __future__ import annotations

from ..core.run_record import FaultRecord
from .handshake import Ready


class Repair:
    """Which ranks are started again, which have come how far, and when.

    Ranks that live let go of each other and wait. Those in `replaced` are started again and join. When all have, they
    connect anew, and the new ones load their shards.

    Args:
        fault: the fault, whose record `finish` completes.
        replaced: ranks that are started again.
        stopped: when the old ones had been ended, in seconds on the coordinator's clock.
    """

    def __init__(self, fault: FaultRecord, replaced: set[int], stopped: float) -> None:
        self.fault = fault
        self.stopped = stopped
        self.looked = stopped  # when it was looked last whether all ranks have a place
        self.unplaced_since: float | None = None
        self.replaced = replaced
        self.present: set[int] = set()  # of those that live: have begun to rejoin
        self.ready: dict[int, Ready] = {}
        self.joined: float | None = None  # when all ranks were connected with the coordinator

    def take(self, message: Ready) -> None:
        """Take note that a rank is ready; a message of an earlier repair is ignored."""
        if message.epoch == self.fault.epoch:
            self.ready[message.rank] = message

    def finish(self, now: float, num_stages: int | None) -> None:
        """Complete the fault's record: all ranks are ready. `num_stages` is None where all stages stand."""
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
