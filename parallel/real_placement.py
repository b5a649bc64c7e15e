"""Placement of a real run's ranks on nodes and racks, and checks of its quality. Imports no torch."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank runs: the id of its node, and the name of its rack if known."""

    node: str
    rack: str | None = None


def stages_together(pp: int, tp: int, devices_per_node: int, rooms: Sequence[int]) -> list[int]:
    """Return candidates for the number of consecutive stages per node, the largest first, 1 last.

    Args:
        pp: number of stages.
        tp: ranks per stage.
        devices_per_node: maximum number of ranks per node.
        rooms: number of ranks that each node has room for.
    """
    found = []
    for stages in range(min(pp, min(devices_per_node, max(rooms, default=0)) // tp), 1, -1):
        if sum(room // (stages * tp) for room in rooms) >= -(-pp // stages):
            found.append(stages)
    return [*found, 1]


def in_order(places: Sequence[Place], last: Place | None = None) -> list[int]:
    """Return the indices of `places`, grouped by rack and by node.

    Args:
        places: places in any order.
        last: the place that follows them; its node and its rack come last.
    """
    where = last or Place("")

    def key(number: int) -> tuple[bool, str, bool, str]:
        place = places[number]
        is_last_rack = last is not None and place.rack == where.rack
        return is_last_rack, place.rack or "", place.node == where.node, place.node

    return sorted(range(len(places)), key=key)


def split_stages(node_of_rank: Mapping[int, str], tp: int) -> dict[int, list[int]]:
    """Return the stages that span several nodes, each with its first rank on each node."""
    first: dict[int, dict[str, int]] = {}
    for rank in sorted(node_of_rank):
        first.setdefault(rank // tp, {}).setdefault(node_of_rank[rank], rank)
    return {stage: list(ranks.values()) for stage, ranks in first.items() if len(ranks) > 1}


def changes(where: Sequence[Hashable]) -> tuple[int, int]:
    """Return how often consecutive stages are at different places, and the minimum over all orders."""
    return sum(a != b for a, b in pairwise(where)), len(set(where)) - 1
