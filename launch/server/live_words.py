"""A server's last seconds in words."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...runtime.explain.finding import find_causes_of_totals
from ...runtime.explain.roots import Root
from ...runtime.explain.words import sentences
from ...runtime.ledger.stragglers import Straggler
from ...runtime.serving.messages import Snapshot
from .last_minute import LastMinute

_LEAST_S = 1.0  # of stage time, before anything is said


def words_of_window(
    minute: LastMinute, snapshot: Snapshot | None, *, layers: Sequence[int] | None = None, policy: str | None = None
) -> list[str]:
    """Say what cost the last seconds most, and what would change it; nothing while there is nothing to say it of.

    Args:
        minute: what the front has counted.
        snapshot: the engine's newest state.
        layers: of each stage, where they are known.
        policy: the server's, which is not recommended again.
    """
    rows = np.array(minute.stage_seconds, np.float64)
    if snapshot is None or rows.sum() < _LEAST_S:
        return []
    slow = [Straggler(each.stage, each.since, minute.ended, each.slowdown, each.waited) for each in snapshot.slow]
    state = minute.means
    evidence = {Root.FEW_REQUESTS: state, Root.KV_FULL: state}
    return sentences(find_causes_of_totals(rows[:, 0], rows[:, 1:], slow, layers, evidence), policy=policy)
