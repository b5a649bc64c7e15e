"""A ledger's idle time as tests read it: one object per interval, and its shares of all stage time."""

from __future__ import annotations

from dataclasses import dataclass

from gapless.runtime.analysis.ledger.causes import CAUSES, Cause
from gapless.runtime.analysis.ledger.ledger import Ledger, inner_bubble_fraction


@dataclass(frozen=True, slots=True)
class IdleInterval:
    """`stage` was idle in [start, end) for `cause`, awaiting `micro_batch`: None after its last one."""

    stage: int
    start: float
    end: float
    cause: Cause
    micro_batch: int | None

    @property
    def seconds(self) -> float:
        return self.end - self.start


def idle_of(ledger: Ledger) -> list[IdleInterval]:
    """Return all idle intervals, by stage, then by time."""
    intervals = []
    for stage, (lane, idle) in enumerate(zip(ledger.lanes, ledger.idle_columns, strict=True)):
        awaited = [*lane.micro_batch.tolist(), None]  # index -1 gives None
        columns = (idle.start.tolist(), idle.end.tolist(), idle.cause.tolist(), idle.place.tolist())
        for start, end, cause, place in zip(*columns, strict=True):
            intervals.append(IdleInterval(stage, start, end, CAUSES[cause], awaited[place]))
    return intervals


def idle_share(ledger: Ledger) -> float:
    """Return the share of all stage time that is idle."""
    return sum(ledger.seconds_by_cause().values()) / ledger.stage_seconds if ledger.stage_seconds else 0.0


def bubble_share(ledger: Ledger) -> float:
    """Return the share of all stage time that is bubbles."""
    return inner_bubble_fraction(ledger.seconds_by_cause(), ledger.stage_seconds)
