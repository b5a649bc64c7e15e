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
        self.replaced = replaced
        self.present: set[int] = set()  # of those that live: have begun to rejoin
        self.ready: dict[int, Ready] = {}
        self.joined: float | None = None  # when all ranks were connected with the coordinator
        self._stopped = stopped

    def take(self, message: Ready) -> None:
        if message.epoch == self.fault.epoch:
            self.ready[message.rank] = message

    def finish(self, now: float) -> None:
        """Complete the fault's record: all ranks are ready."""
        assert self.joined is not None
        rendezvous_s = min(max(ready.rendezvous_s for ready in self.ready.values()), now - self.joined)
        self.fault.parts = {
            "stop": self._stopped - self.fault.detected,
            "start": self.joined - self._stopped,
            "rendezvous": rendezvous_s,
            "weights": now - self.joined - rendezvous_s,
        }
        self.fault.ranks = sorted(self.replaced)
        self.fault.up = now
