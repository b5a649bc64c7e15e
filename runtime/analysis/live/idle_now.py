"""The idle seconds of a server's stages up to now."""

from __future__ import annotations

from ...serving.messages import Snapshot
from ..ledger.causes import Cause


def idle_at(snapshot: Snapshot, now: float) -> list[list[float]]:
    """Return a snapshot's idle seconds plus the wait in progress, for a repair or for requests."""
    rows = [list(row) for row in snapshot.idle]
    since = snapshot.recovery.since
    if since is not None or snapshot.is_idle:
        cause = Cause.STARVED_NO_REQUEST if since is None else Cause.RECOVERY
        for row, end in zip(rows, snapshot.ends, strict=True):
            row[cause.code] += max(0.0, now - (end if since is None else max(end, since)))
    return rows
